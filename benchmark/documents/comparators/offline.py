"""Selectors that depend on the chunk alone: the paper's controls, and EPIC."""

from __future__ import annotations

import torch

from canopy_documents.fuse.selectors.base import OfflineSelector, SelectorInput, sorted_union
from canopy_documents.fuse.selectors.frequency import layer_scores
from canopy_documents.store.chunk import Chunk

EPIC_TOKENS = 16
"""Tokens of a chunk that the baseline EPIC recomputes (CacheTune, section 5.1, item 5)."""


class HighFrequency(OfflineSelector):
    """The complement of ``frequency``: the paper's own control (Figure 10)."""

    name = "high-frequency"

    def score(self, chunk: Chunk) -> torch.Tensor:
        return layer_scores(chunk, high=True).mean(dim=0)


class Random(OfflineSelector):
    """Seeded by the chunk's tokens: the same chunk gives the same choice everywhere."""

    name = "random"

    def score(self, chunk: Chunk) -> torch.Tensor:
        generator = torch.Generator().manual_seed(hash(chunk.ids) & 0x7FFFFFFF)
        return torch.rand(len(chunk), generator=generator)


class ValueNorm(OfflineSelector):
    """Mean over layers of each token's V norm, each layer normalised by its sum."""

    name = "v-norm"

    def score(self, chunk: Chunk) -> torch.Tensor:
        norm = chunk.v.flatten(2).float().norm(dim=-1)
        return (norm / (norm.sum(dim=1, keepdim=True) + 1e-12)).mean(dim=0)


class FirstTokens(OfflineSelector):
    """The first ``floor(ratio * n)`` tokens of each chunk, where encoding alone made attention sinks."""

    name = "first-k"

    def score(self, chunk: Chunk) -> torch.Tensor:
        return -torch.arange(len(chunk), dtype=torch.float32)


class Epic(FirstTokens):
    """EPIC: the first 16 tokens of each chunk at any ratio above 0."""

    name = "epic"

    def choose(self, inputs: SelectorInput) -> torch.Tensor:
        placed = inputs.prompt.placed
        ends = [min(p.start + EPIC_TOKENS, p.end) for p in placed]
        return sorted_union([torch.arange(p.start, end) for p, end in zip(placed, ends)])
