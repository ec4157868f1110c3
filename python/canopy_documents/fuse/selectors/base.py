"""The selector interface: choose which tokens of the chunks to recompute, within a budget."""

from __future__ import annotations

import abc
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from canopy_documents.fuse.cache import KVCache
from canopy_documents.fuse.model import Model
from canopy_documents.store.chunk import Chunk, FusedPrompt
from canopy_documents.store.device_copy import to_device


@dataclass(frozen=True, slots=True)
class SelectorInput:
    """Input of a selector. The cache holds the reused KV only if ``reads_cache``.

    exact_prefix_tokens: tokens at the prompt's start whose exact KV is already in the cache.
    """

    model: Model
    prompt: FusedPrompt
    cache: KVCache
    ratio: float
    exact_prefix_tokens: int = 0

    @property
    def budget(self) -> int:
        """Tokens to recompute, over all chunks together."""
        return math.floor(self.ratio * self.prompt.chunk_tokens)


class Selector(abc.ABC):
    """A method to choose tokens.

    reads_cache: whether it reads the reused KV at its position in the prompt.
    """

    name: ClassVar[str]
    reads_cache: ClassVar[bool] = False

    @abc.abstractmethod
    def choose(self, inputs: SelectorInput) -> torch.Tensor:
        """Return the sorted positions to recompute, on the host or the model's device."""


class OfflineSelector(Selector):
    """A selector whose scores depend only on the chunk: computed once and stored with it."""

    @abc.abstractmethod
    def score(self, chunk: Chunk) -> torch.Tensor:
        """Return ``[n]`` fp32 on the chunk's device; the highest are recomputed first."""

    def scores(self, chunk: Chunk) -> torch.Tensor:
        """Return the stored scores; compute them on first use."""
        if self.name not in chunk.scores:
            chunk.scores[self.name] = self.score(chunk)
        return chunk.scores[self.name]

    def choose(self, inputs: SelectorInput) -> torch.Tensor:
        """Choose the top ``floor(ratio * n)`` of each chunk (CacheTune, equation 7); ties go
        to the earlier token."""
        parts = [
            top_positions(self.scores(p.chunk), math.floor(inputs.ratio * len(p.chunk))) + p.start
            for p in inputs.prompt.placed
        ]
        return sorted_union(parts)


def top_positions(token_scores: torch.Tensor, count: int) -> torch.Tensor:
    """Return the sorted indices of the ``count`` highest; ties go to the smaller index."""
    order = torch.argsort(token_scores, descending=True, stable=True)
    return order[:count].sort()[0]


def sorted_union(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the positions in one sorted tensor without duplicates."""
    return torch.cat([torch.empty(0, dtype=torch.long), *parts]).unique()


def top_allowed(token_scores: torch.Tensor, allowed: torch.Tensor, count: int) -> torch.Tensor:
    """Return the ``count`` ``allowed [n]`` positions with the highest ``token_scores [n]``, or all
    allowed positions if they are fewer.

    allowed is bool on the host, so that the number is known without reading the scores. The scores
    may be on a device; the sorted positions are on the same device.
    """
    excluded = to_device(~allowed, token_scores.device)
    count = max(0, min(count, int(allowed.sum())))
    return top_positions(token_scores.masked_fill(excluded, float("-inf")), count)
