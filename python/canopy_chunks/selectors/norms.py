"""V norm: tokens with large values (a common proxy for importance)."""

from __future__ import annotations

import torch

from canopy_chunks.chunk import Chunk
from canopy_chunks.selectors.base import Offline


class ValueNorm(Offline):
    """Mean over layers of each token's V norm, each layer normalised by its sum."""

    name = "v-norm"

    def score(self, chunk: Chunk) -> torch.Tensor:
        norm = chunk.v.flatten(2).float().norm(dim=-1)
        return (norm / (norm.sum(dim=1, keepdim=True) + 1e-12)).mean(dim=0)
