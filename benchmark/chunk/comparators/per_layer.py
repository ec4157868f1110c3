"""Different tokens in each layer: equation 7 as printed."""

from __future__ import annotations

import math

import torch

from canopy_chunks.fuse.selectors.base import Context, SelectedTokens, top
from canopy_chunks.fuse.selectors.frequency import Frequency, layer_scores
from canopy_chunks.store.chunk import Chunk


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
