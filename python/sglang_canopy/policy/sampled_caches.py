"""Several shadow caches over one sample of the requests, and what each of them saved.

The sample is of whole conversations, by a hash, and each cache is smaller by the sampled share
(SHARDS, Waldspurger et al., FAST 2015). Only the requests and their stamps decide what is sampled,
so that all tensor-parallel ranks sample alike.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable
from dataclasses import dataclass

from sglang_canopy.policy.base import Policy
from sglang_canopy.policy.shadow_cache import ShadowCache, as_sampled
from sglang_canopy.records import Request

MOST_PER_S = 8.0
"""Sampled requests a second, on average over a minute, above which half of the sample goes."""

MEMORY_REQUESTS = 3000
"""A sampled request's weight falls to 1/e after so many more."""

MOST_BLOCKS = 200_000
"""Blocks that one shadow cache may hold; beyond, half of the sample goes."""

_SAMPLE_S = 60.0
_MASK = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class Arm:
    """One shadow cache: whose order, and how large the cache is that it stands for."""

    make: Callable[[], Policy]
    tokens: int
    whole_nodes: bool = False


class SampledCaches:
    """Shadow caches by name. ``one_in``: of so many conversations one is sampled; ``None`` starts
    with all and doubles whenever a minute has more than ``most_per_s`` sampled requests a second.
    """

    def __init__(self, one_in: int | None = None, most_per_s: float = MOST_PER_S) -> None:
        self.one_in = one_in or 1
        self.seen = 0
        """Sampled requests."""
        self.asked = 0.0
        """Their prompt tokens; recent requests weigh most, here and in ``saved``."""
        self.saved: dict[Hashable, float] = {}
        """Prompt tokens that each cache had."""
        self.asked_ever = 0
        self.saved_ever: dict[Hashable, int] = {}
        """The same since the start, each weighing alike."""
        self._arms: dict[Hashable, Arm] = {}
        self._caches: dict[Hashable, ShadowCache] = {}
        self._squares: dict[tuple[Hashable, Hashable], float] = {}
        self._most_per_s = math.inf if one_in else most_per_s
        self._thins = one_in is None
        self._counted_from, self._counted = 0.0, 0

    def add(self, name: Hashable, arm: Arm) -> None:
        """Another cache, empty. One of the same name and size is left as it is."""
        old = self._arms.get(name)
        if old is not None and old.tokens == arm.tokens:
            return
        self._arms[name] = arm
        self._caches.pop(name, None)
        self.saved.setdefault(name, 0.0)
        self.saved_ever.setdefault(name, 0)

    def samples(self, conversation: int) -> bool:
        """Whether a conversation, by any number that names it, is in the sample."""
        return _mixed(conversation) % self.one_in == 0

    def observe(self, request: Request, conversation: Hashable) -> dict[Hashable, int]:
        """Serve a sampled request that has ended in every cache; prompt tokens that each had.

        Its label must be set, its path extended over the output where it is known.
        """
        if not self._arms or not request.path:
            return {}
        self._thin_out(request)
        copy = as_sampled(request, conversation)
        saved = {name: self._cache(name, copy).access(copy) for name in self._arms}
        keep = 1.0 - 1.0 / MEMORY_REQUESTS
        self.asked = self.asked * keep + copy.prompt_tokens
        self.asked_ever += copy.prompt_tokens
        for name, tokens in saved.items():
            self.saved[name] = self.saved[name] * keep + tokens
            self.saved_ever[name] += tokens
        self._compare(saved, keep)
        self.seen += 1
        return saved

    def hit_ratio(self, name: Hashable) -> float:
        """Share of the sampled prompt tokens that a cache had."""
        return self.saved[name] / (self.asked or 1.0)

    def ahead(self, name: Hashable, other: Hashable) -> tuple[float, float]:
        """Prompt tokens by which ``name`` is ahead of ``other``, and the standard error of that."""
        squares = self._squares.get((name, other), self._squares.get((other, name), 0.0))
        return self.saved[name] - self.saved[other], math.sqrt(squares)

    def blocks(self) -> dict[Hashable, int]:
        """Blocks that each cache holds."""
        return {name: len(cache) for name, cache in self._caches.items()}

    def _cache(self, name: Hashable, request: Request) -> ShadowCache:
        cache = self._caches.get(name)
        if cache is None:
            arm = self._arms[name]
            cache = self._caches[name] = ShadowCache(
                arm.make(), arm.tokens, request.block_tokens, self.one_in, arm.whole_nodes
            )
        return cache

    def _compare(self, saved: dict[Hashable, int], keep: float) -> None:
        names = list(saved)
        for i, name in enumerate(names):
            mine = saved[name]
            for other in names[:i]:
                squares = self._squares.get((name, other), 0.0)
                self._squares[name, other] = squares * keep + float(mine - saved[other]) ** 2

    def _thin_out(self, request: Request) -> None:
        """Halve the sample when it has more requests, or the caches more blocks, than allowed."""
        if not self._thins:
            return
        now = request.time
        if not self._counted:
            self._counted_from = now
        self._counted += 1
        largest = max(arm.tokens for arm in self._arms.values())
        dense = self._counted > self._most_per_s * max(_SAMPLE_S, now - self._counted_from)
        if dense or largest > self.one_in * MOST_BLOCKS * request.block_tokens:
            self.one_in *= 2
            for cache in self._caches.values():
                cache.tree.thin_out(self.one_in)
            self._counted = 0
        elif now - self._counted_from >= _SAMPLE_S:
            self._counted = 0


def _mixed(number: int) -> int:
    """SplitMix64's finaliser, so that neighbouring numbers fall apart."""
    z = (number + 0x9E3779B97F4A7C15) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)
