"""The first tokens of each chunk, where encoding alone made attention sinks: a share, or EPIC's 16."""

from __future__ import annotations

import torch

from canopy_chunks.chunk import Chunk
from canopy_chunks.selectors.base import Context, Offline, SelectedTokens, join

EPIC_TOKENS = 16
"""Tokens of a chunk that the baseline EPIC recomputes (CacheTune, section 5.1, item 5)."""


class FirstTokens(Offline):
    """The first ``floor(ratio * n)`` tokens of each chunk."""

    name = "first-k"

    def score(self, chunk: Chunk) -> torch.Tensor:
        return -torch.arange(len(chunk), dtype=torch.float32)


class Epic(FirstTokens):
    """EPIC: the first 16 tokens of each chunk, whatever the ratio, as long as it is above 0."""

    name = "epic"

    def choose(self, context: Context) -> SelectedTokens:
        placed = context.prompt.placed
        return SelectedTokens(
            join([torch.arange(p.start, min(p.start + EPIC_TOKENS, p.end)) for p in placed])
        )
