"""EPIC: the first tokens of each chunk, where isolated encoding made attention sinks."""

from __future__ import annotations

import torch

from sglang_canopy.chunk.chunk import Chunk
from sglang_canopy.chunk.selectors.base import Offline


class FirstTokens(Offline):
    """The first ``floor(ratio * n)`` tokens of each chunk."""

    name = "first-k"

    def score(self, chunk: Chunk) -> torch.Tensor:
        return -torch.arange(len(chunk), dtype=torch.float32)
