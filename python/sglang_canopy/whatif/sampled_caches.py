"""Shadow caches that share one sample of blocks.

Blocks are sampled by a hash of their ids (SHARDS, Waldspurger et al., FAST 2015). An id identifies
the whole path up to its block, so on every path a sampled block follows its sampled ancestors, and
the sampled blocks form a prefix tree. Prefixes shared between conversations are sampled like any
other block; sampling whole conversations would see too few uses of them. The sample depends on
requests and their stamps alone and is therefore identical on all tensor-parallel ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from sglang_canopy.policy.base import Policy
from sglang_canopy.records import Request
from sglang_canopy.whatif.shadow_cache import ShadowCache

MAX_WORK_PER_S = 150.0
"""Halve the sample if the work per second, averaged over a minute, exceeds this. A unit is one
request in one shadow cache, about 60 us on a slow core: below 1 % of a thread."""

OBSERVE_WORK = 0.8
"""Work of a request that policies learn from."""

LEARN_FROM_ALL_PER_S = 32.0
"""Request rate above which policies learn only from requests with a sampled block."""

PASS_WORK = 0.1
"""Work of every request: checking its blocks."""

WORK_PER_BLOCK = 0.001
"""Additional work of a request for each block of its path, at most one unit per thousand."""

MIN_WORK_PER_S = 12.0
"""Work per second that shadow caches may always do, regardless of the request rate."""

MAX_BLOCKS = 32_768
"""Blocks in one shadow cache above which the sample is halved, in one call."""

MIN_BLOCKS = 64
"""Capacity of the smallest shadow cache, in sampled blocks. The hits of a smaller cache are mostly
chance, so sampling pauses instead of thinning further."""

_WINDOW_S = 60.0
_MIN_WINDOW_S = 10.0
_MASK = (1 << 64) - 1
MULTIPLIER = 0x9E3779B97F4A7C15
"""2^64 over the golden ratio, odd: Fibonacci hashing (Knuth, vol. 3, section 6.4)."""


@dataclass(frozen=True, slots=True)
class Arm:
    """A shadow cache: policy factory and capacity of the cache that it models."""

    make: Callable[[], Policy]
    tokens: int
    whole_nodes: bool = False


class Picked(NamedTuple):
    """Sampled part of a request."""

    blocks: tuple[int, ...]
    prompt_tokens: int
    """Prompt tokens represented by the sampled blocks."""


class Sample(NamedTuple):
    """Result of serving one request in all shadow caches."""

    blocks: tuple[int, ...]
    prompt_tokens: int
    hit_blocks: dict[Hashable, int]
    """Leading blocks of ``blocks`` that each cache hit."""
    saved_tokens: dict[Hashable, int]
    """Prompt tokens represented by these hits."""


def block_number(block: int) -> int:
    """Hash a block id to 32 bits, scattering neighbouring ids."""
    return (block * MULTIPLIER & _MASK) >> 32


def covered_tokens(request: Request) -> int:
    """Return the prompt tokens covered by the blocks of a request's path."""
    return min(request.prompt_tokens, len(request.path) * request.block_tokens)


class SampledCaches:
    """Shadow caches by name.

    ``one_in``: sample one block in this many. ``None`` starts with all blocks and halves the sample
    whenever a minute exceeds ``most_work_per_s``.
    """

    def __init__(self, one_in: int | None = None, most_work_per_s: float = MAX_WORK_PER_S) -> None:
        self.one_in = one_in or 1
        self.seen = 0
        """Requests with a sampled block."""
        self.paused = False
        """True while the load would need a sample below ``MIN_BLOCKS``; nothing is sampled."""
        self.requests_per_s = 0.0
        """Request rate of the previous minute."""
        self._arms: dict[Hashable, Arm] = {}
        self._caches: dict[Hashable, ShadowCache] = {}
        self._unthinned: list[Hashable] = []
        """Caches that still hold the larger sample. One is thinned out per request."""
        self._largest = 0
        """Capacity, in tokens, of the largest modelled cache."""
        self._adaptive = one_in is None
        self._most_work_per_s = most_work_per_s
        self._window_start = -math.inf
        self._requests, self._cache_accesses, self._request_blocks = 0, 0, 0

    def add(self, name: Hashable, arm: Arm) -> None:
        """Add an empty cache, unless one of the same name and size exists."""
        old = self._arms.get(name)
        if old is not None and old.tokens == arm.tokens:
            return
        self._arms[name] = arm
        self._largest = max(one.tokens for one in self._arms.values())
        self._caches.pop(name, None)

    def remove(self, names: Iterable[Hashable]) -> None:
        for name in names:
            self._arms.pop(name, None)
            self._caches.pop(name, None)

    def samples(self, block: int) -> bool:
        return block_number(block) % self.one_in == 0

    def pick(self, request: Request) -> Picked | None:
        """Return the sampled part of a finished request; ``None`` if no block is sampled.

        Call once per request, because this counts its work. The path may include the output.
        """
        if not self._arms or not request.path:
            return None
        self._limit_work(request)
        if self._unthinned:
            self._thin_out_one()
            return None
        if self.paused:
            return None
        n, path, tokens = self.one_in, request.path, request.block_tokens
        prompt_blocks = -(-request.prompt_tokens // tokens)
        if n == 1:
            return Picked(tuple(path), covered_tokens(request))
        blocks = self.sampled(path[:prompt_blocks])
        represented_tokens = len(blocks) * tokens
        if prompt_blocks <= len(path) and blocks and blocks[-1] == path[prompt_blocks - 1]:
            # The prompt only partly fills its last block, which is sampled.
            represented_tokens -= prompt_blocks * tokens - request.prompt_tokens
        blocks += self.sampled(path[prompt_blocks:])
        return Picked(tuple(blocks), n * represented_tokens) if blocks else None

    def serve(self, copy: Request, picked: Picked) -> Sample:
        """Serve the sampled part of a request in every cache. Modifies ``copy``."""
        copy.path = picked.blocks
        copy.block_tokens *= self.one_in
        represented_tokens = picked.prompt_tokens
        hits = {name: self._cache(name, copy).access(copy) for name in self._arms}
        saved = {
            name: min(hit * copy.block_tokens, represented_tokens) for name, hit in hits.items()
        }
        self.seen += 1
        self._cache_accesses += len(self._arms)
        return Sample(picked.blocks, represented_tokens, hits, saved)

    @property
    def skips(self) -> bool:
        """True while no request is sampled: paused, or a cache still holds a larger sample."""
        return self.paused or bool(self._unthinned)

    def is_too_small(self, name: Hashable) -> bool:
        """Return whether the sample leaves a cache fewer than ``MIN_BLOCKS``."""
        cache = self._caches.get(name)
        return cache is not None and self.one_in > 1 and cache.capacity_blocks < MIN_BLOCKS

    def has_evicted(self, name: Hashable) -> bool:
        """Return whether a cache has been full; until then all policies hit the same."""
        cache = self._caches.get(name)
        return cache is not None and cache.has_evicted

    def blocks(self) -> dict[Hashable, int]:
        return {name: len(cache) for name, cache in self._caches.items()}

    def sampled(self, path: Sequence[int]) -> list[int]:
        n = self.one_in  # block_number inlined: this runs for every block of every request
        if n & (n - 1) == 0:
            bits = n - 1 << 32
            return [b for b in path if not b * MULTIPLIER & bits]
        return [b for b in path if ((b * MULTIPLIER & _MASK) >> 32) % n == 0]

    def _cache(self, name: Hashable, request: Request) -> ShadowCache:
        cache = self._caches.get(name)
        if cache is None:
            arm = self._arms[name]
            block_tokens = request.block_tokens // self.one_in
            cache = self._caches[name] = ShadowCache(
                arm.make(), arm.tokens, block_tokens, self.one_in, arm.whole_nodes
            )
        return cache

    def _limit_work(self, request: Request) -> None:
        """Halve the sample if the work or the size of the caches exceeds its limit."""
        now = request.time
        if not self._requests:
            self._window_start = now
        self._requests += 1
        self._request_blocks += len(request.path)
        span = max(_WINDOW_S, now - self._window_start)
        large = self._largest > self.one_in * MAX_BLOCKS * request.block_tokens
        dense = self._cache_accesses > self._most_accesses_per_s(span) * span
        if self._adaptive and (dense or large):
            self._thin_out(self._required_interval(now) if dense else 0, request.block_tokens)
        elif now - self._window_start < _WINDOW_S:
            return
        elif self.paused:
            self._resume(self._required_interval(now), request.block_tokens)
        self.requests_per_s = self._requests / max(_MIN_WINDOW_S, now - self._window_start)
        self._requests = self._cache_accesses = self._request_blocks = 0

    def _most_accesses_per_s(self, span: float) -> float:
        """Return the cache accesses per second that the work of all requests leaves."""
        learnt = self._requests
        if self.requests_per_s > LEARN_FROM_ALL_PER_S:
            learnt = self._cache_accesses // max(1, len(self._arms))
        work = OBSERVE_WORK * learnt + PASS_WORK * self._requests
        work += WORK_PER_BLOCK * self._request_blocks
        return max(MIN_WORK_PER_S, self._most_work_per_s - work / span)

    def _thin_out(self, required: int, block_tokens: int) -> None:
        """Sample one block in ``required`` or fewer; pause if that leaves too few."""
        one_in = max(2 * self.one_in, required)
        if required and one_in > self._max_interval(block_tokens):
            self.paused = True
            self._caches.clear()
            self._unthinned.clear()
            return
        self.one_in = one_in
        self._unthinned = list(self._caches)

    def _thin_out_one(self) -> None:
        name = self._unthinned.pop()
        if cache := self._caches.get(name):
            cache.thin_out(self._arms[name].make(), self.one_in, self.samples)

    def _resume(self, required: int, block_tokens: int) -> None:
        """Sample again, with empty caches, once half of the allowed sample would suffice."""
        if 2 * required <= self._max_interval(block_tokens):
            self.paused = False
            self.one_in = required

    def _max_interval(self, block_tokens: int) -> int:
        smallest = min((arm.tokens for arm in self._arms.values()), default=0)
        return smallest // (MIN_BLOCKS * block_tokens)

    def _required_interval(self, now: float) -> int:
        """Return the ``one_in``, a power of 2, that brings this minute's load below the limit.

        Halving alone would take minutes, because a prompt of L blocks is served with probability
        1 - (1 - 1/N)^L.
        """
        span = max(_MIN_WINDOW_S, now - self._window_start)
        per_s, blocks = self._requests / span, self._request_blocks / self._requests
        served_work = float(len(self._arms))
        every_s = (PASS_WORK + WORK_PER_BLOCK * blocks) * per_s
        if per_s > LEARN_FROM_ALL_PER_S:
            served_work += OBSERVE_WORK
        else:
            every_s += OBSERVE_WORK * per_s
        most = max(MIN_WORK_PER_S, self._most_work_per_s - every_s)
        share = min(0.99, most / (per_s * served_work))
        return int(2 ** math.floor(math.log2(max(1.0, blocks / -math.log(1.0 - share)))))
