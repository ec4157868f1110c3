"""Uniformly random tokens of each chunk: the line every other selector must beat."""

from __future__ import annotations

import torch

from canopy_chunks.chunk import Chunk
from canopy_chunks.selectors.base import Offline


class Random(Offline):
    """Seeded by the chunk's tokens: the same chunk gives the same choice everywhere."""

    name = "random"

    def score(self, chunk: Chunk) -> torch.Tensor:
        generator = torch.Generator().manual_seed(hash(chunk.ids) & 0x7FFFFFFF)
        return torch.rand(len(chunk), generator=generator)
