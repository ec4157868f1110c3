"""Low- and high-frequency energy of K and V (CacheTune, equations 2 to 7)."""

from __future__ import annotations

import math

import torch

from canopy_chunks.chunk import Chunk
from canopy_chunks.selectors.base import Context, Offline, SelectedTokens, join, top
from canopy_chunks.selectors.nested import nested_choice
from canopy_kernel.lowpass import lowpass_energy

ALPHA = 0.5
"""Share of the one-sided spectrum that counts as low (the paper's value)."""


def layer_scores(chunk: Chunk, high: bool = False, alpha: float = ALPHA) -> torch.Tensor:
    """``[layers, n]``: energy of each token, each layer normalised by its sum (equations 2 to 6)."""
    energy = lowpass_energy(chunk.raw_k.flatten(2), chunk.v.flatten(2), alpha, high)
    return (energy / (energy.sum(dim=1, keepdim=True) + 1e-12)).cpu()


class Frequency(Offline):
    """Low-frequency energy, averaged over layers, one set for all layers.

    ``alpha`` is the share of the spectrum that counts as low. A set for all layers is what the
    paper's own code runs; for equation 7 as printed see :class:`FrequencyPerLayer`.
    """

    name = "frequency"
    high = False

    def __init__(self, alpha: float = ALPHA) -> None:
        self.alpha = alpha

    @property
    def stored_as(self) -> str:
        return self.name if self.alpha == ALPHA else f"{self.name} {self.alpha:g}"

    def score(self, chunk: Chunk) -> torch.Tensor:
        return layer_scores(chunk, self.high, self.alpha).mean(dim=0)


class HighFrequency(Frequency):
    """The complement: the paper's own control (Figure 10)."""

    name = "high-frequency"
    high = True


class FrequencyPerLayer(Frequency):
    """Each layer its own set of ``floor(ratio * n)`` tokens of each chunk: equation 7 as printed.

    A token of layer l's set needs its hidden state from the layer below, so the union of all sets
    runs through all layers. At a layer only its own set's K and V replace the reused ones, so the
    KV is the paper's; the computing done is the union's and therefore larger than the ratio.
    """

    name = "frequency-per-layer"

    def score(self, chunk: Chunk) -> torch.Tensor:
        return layer_scores(chunk, self.high, self.alpha)

    def choose(self, context: Context) -> SelectedTokens:
        prompt, layers = context.prompt, context.model.shape.layers
        chosen = torch.zeros(layers, len(prompt), dtype=torch.bool)
        for p in prompt.placed:
            count = math.floor(context.ratio * len(p.chunk))
            for layer, score in enumerate(self.scores(p.chunk)):
                chosen[layer, p.start + top(score, count)] = True
        always = ~prompt.in_chunk()
        always[len(prompt) - 1] = True

        def replaced(layer: int, positions: torch.Tensor) -> torch.Tensor:
            at = positions.cpu()
            return (chosen[layer] | always)[at].nonzero()[:, 0].to(positions.device)

        return SelectedTokens(chosen.any(dim=0).nonzero()[:, 0], replaced=replaced)


class FrequencyNested(FrequencyPerLayer):
    """Sets that shrink from layer to layer: what the ratio pays for, unlike equation 7's."""

    name = "frequency-nested"

    def choose(self, context: Context) -> SelectedTokens:
        prompt, layers = context.prompt, context.model.shape.layers
        score = torch.full((layers, len(prompt)), float("-inf"))
        for p in prompt.placed:
            score[:, p.start : p.end] = self.scores(p.chunk) * len(p.chunk)
        return nested_choice(context, score)


__all__ = [
    "Frequency",
    "FrequencyNested",
    "FrequencyPerLayer",
    "HighFrequency",
    "join",
    "top",
]
