"""Different tokens in each layer: equation 7 as printed, and nested sets of the same cost."""

from __future__ import annotations

import math

import torch

from canopy_chunks.fuse.selectors.base import Context, SelectedTokens, top
from canopy_chunks.fuse.selectors.frequency import Frequency, layer_scores
from canopy_chunks.store.chunk import Chunk

SLOPE = 0.5
"""Budgets fall linearly from (1 + SLOPE) to (1 - SLOPE) times the mean over the layers."""


def nested_choice(context: Context, score: torch.Tensor, slope: float = SLOPE) -> SelectedTokens:
    """Nested sets from ``score [layers, prompt]`` (``-inf`` outside chunks).

    A row at layer l is worth its mean score over the layers from l on. Rows outside chunks are
    kept throughout; the mean number of chunk rows over the layers is the context's budget.
    """
    layers = score.shape[0]
    inside = torch.isfinite(score[0])
    ahead = score.masked_fill(~inside, 0.0).flip(0).cumsum(0).flip(0)
    ahead = ahead / torch.arange(layers, 0, -1)[:, None]
    steps = torch.linspace(1 + slope, 1 - slope, layers)
    counts = [min(round(float(f) * context.budget), int(inside.sum())) for f in steps]
    first = top(ahead[0].masked_fill(~inside, float("-inf")), counts[0])

    def narrow(layer, positions, k, v):  # type: ignore[no-untyped-def]
        if layer == 0 or counts[layer] == counts[layer - 1]:
            return None
        at = positions.cpu()
        chunk_row = inside[at]
        chunk_row[at == len(inside) - 1] = False
        keep = ~chunk_row
        rows = chunk_row.nonzero()[:, 0]
        keep[rows[top(ahead[layer][at[rows]], counts[layer])]] = True
        return keep.nonzero()[:, 0].to(positions.device)

    return SelectedTokens(first, narrow)


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
    """Sets that shrink from layer to layer; unlike equation 7's, their cost equals the ratio."""

    name = "frequency-nested"

    def choose(self, context: Context) -> SelectedTokens:
        prompt, layers = context.prompt, context.model.shape.layers
        score = torch.full((layers, len(prompt)), float("-inf"))
        for p in prompt.placed:
            score[:, p.start : p.end] = self.scores(p.chunk) * len(p.chunk)
        return nested_choice(context, score)
