"""What a selector is: it spends a budget of recomputed tokens on a prompt's chunks."""

from __future__ import annotations

import abc
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from canopy_chunks.fuse.cache import KVCache
from canopy_chunks.fuse.model import Model
from canopy_chunks.fuse.rows import Narrow, Replaced
from canopy_chunks.store.chunk import Chunk, FusedPrompt
from canopy_chunks.store.device_copy import to_device


@dataclass(frozen=True, slots=True)
class Context:
    """What a selector may look at. The cache holds the reused KV only if ``reads_cache``.

    ready: tokens at the prompt's start whose exact KV is in the cache already.
    """

    model: Model
    prompt: FusedPrompt
    cache: KVCache
    ratio: float
    ready: int = 0

    @property
    def budget(self) -> int:
        """Tokens over all chunks together."""
        return math.floor(self.ratio * self.prompt.reusable)


@dataclass(frozen=True, slots=True)
class SelectedTokens:
    """tokens: positions to run at layer 0, sorted, on the host or where the model is; narrow: drops
    rows at deeper layers, or None; replaced: of which rows each layer's K and V replace the reused
    ones, or None for all that run."""

    tokens: torch.Tensor
    narrow: Narrow | None = None
    replaced: Replaced | None = None


class Selector(abc.ABC):
    """One way to choose tokens.

    reads_cache: it looks at the reused KV where it lies in the prompt.
    """

    name: ClassVar[str]
    reads_cache: ClassVar[bool] = False

    @abc.abstractmethod
    def choose(self, context: Context) -> SelectedTokens:
        """The tokens to recompute; at most ``context.budget`` of them unless it narrows later."""


class Offline(Selector):
    """A selector whose scores need the chunk alone: made once, stored with it, reused for ever."""

    @property
    def stored_as(self) -> str:
        """What its scores are stored under: the name, and whatever else they depend on."""
        return self.name

    @abc.abstractmethod
    def score(self, chunk: Chunk) -> torch.Tensor:
        """``[n]`` fp32 where the chunk is: higher is recomputed first."""

    def scores(self, chunk: Chunk) -> torch.Tensor:
        """The stored score, made on first use."""
        if self.stored_as not in chunk.scores:
            chunk.scores[self.stored_as] = self.score(chunk)
        return chunk.scores[self.stored_as]

    def choose(self, context: Context) -> SelectedTokens:
        """The top ``floor(ratio * n)`` of each chunk (equation 7); ties go to the earlier token."""
        parts = [
            top(self.scores(p.chunk), math.floor(context.ratio * len(p.chunk))) + p.start
            for p in context.prompt.placed
        ]
        return SelectedTokens(join(parts))


def top(score: torch.Tensor, count: int) -> torch.Tensor:
    """Sorted indices of the ``count`` highest; ties go to the smaller index."""
    order = torch.argsort(score, descending=True, stable=True)
    return order[:count].sort()[0]


def join(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Positions in one sorted tensor without duplicates."""
    return torch.cat([torch.empty(0, dtype=torch.long), *parts]).unique()


def best(score: torch.Tensor, allowed: torch.Tensor, count: int) -> torch.Tensor:
    """The ``count`` best positions by ``score [n]``, at most all that are ``allowed [n]``.

    allowed is bool on the host, so that their number is known without reading the scores, which
    may be on a device; so are then the positions returned, sorted.
    """
    hidden = to_device(~allowed, score.device)
    count = max(0, min(count, int(allowed.sum())))
    return top(score.masked_fill(hidden, float("-inf")), count)
