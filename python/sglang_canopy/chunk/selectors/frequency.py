"""Low- and high-frequency energy of K and V (CacheTune, equations 2 to 7)."""

from __future__ import annotations

import torch

from canopy_kernel.lowpass import lowpass_energy
from sglang_canopy.chunk.chunk import Chunk
from sglang_canopy.chunk.selectors.base import Context, Offline, SelectedTokens, join, top
from sglang_canopy.chunk.selectors.nested import nested_choice

ALPHA = 0.5
"""Share of the one-sided spectrum that counts as low (the paper's value)."""


def layer_scores(chunk: Chunk, high: bool = False) -> torch.Tensor:
    """``[layers, n]``: energy of each token, each layer normalised by its sum (equations 2 to 6)."""
    energy = lowpass_energy(chunk.raw_k.flatten(2), chunk.v.flatten(2), ALPHA, high)
    return (energy / (energy.sum(dim=1, keepdim=True) + 1e-12)).cpu()


class Frequency(Offline):
    """The paper's selector: low-frequency energy, averaged over layers, one set for all layers."""

    name = "frequency"

    def score(self, chunk: Chunk) -> torch.Tensor:
        return layer_scores(chunk).mean(dim=0)


class HighFrequency(Offline):
    """The complement: the paper's own control."""

    name = "high-frequency"

    def score(self, chunk: Chunk) -> torch.Tensor:
        return layer_scores(chunk, high=True).mean(dim=0)


class FrequencyPerLayer(Frequency):
    """Each layer its own set. A row must have come through the layers below, so sets are nested."""

    name = "frequency-per-layer"

    def scores(self, chunk: Chunk) -> torch.Tensor:
        if self.name not in chunk.scores:
            chunk.scores[self.name] = layer_scores(chunk)
        return chunk.scores[self.name]

    def choose(self, context: Context) -> SelectedTokens:
        prompt, layers = context.prompt, context.model.shape.layers
        score = torch.full((layers, len(prompt)), float("-inf"))
        for p in prompt.placed:
            score[:, p.start : p.end] = self.scores(p.chunk) * len(p.chunk)
        return nested_choice(context, score)


__all__ = ["Frequency", "FrequencyPerLayer", "HighFrequency", "join", "top"]
