"""Several shadow caches over one sample of the blocks, and what each of them saved.

The sample is of blocks, by a hash of their ids (SHARDS, Waldspurger et al., FAST 2015). An id names
the whole path up to its block, so a sampled block's ancestors that are sampled lie before it on
every path, and the sampled blocks form a prefix tree of their own. What several conversations share
is sampled like anything else; a sample of conversations would see its users too rarely. Only the
requests and their stamps decide what is sampled, so that all tensor-parallel ranks sample alike.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from sglang_canopy.policy.base import Policy
from sglang_canopy.records import Request
from sglang_canopy.whatif.shadow_cache import ShadowCache

MOST_WORK_PER_S = 150.0
"""Above this average over a minute, half of the sample goes. A unit is one request in one shadow
cache, some 60 us on a slow core: below 1 % of a thread."""

OBSERVE_WORK = 0.8
"""What a request costs of which no block is in the sample: its blocks are hashed and looked at."""

LEAST_WORK_PER_S = 12.0
"""What the shadow caches may do however many requests there are."""

MOST_BLOCKS = 200_000
"""Blocks that one shadow cache may hold; beyond, half of the sample goes."""

_SAMPLE_S = 60.0
_BURST_S = 10.0
_MASK = (1 << 64) - 1
_MULTIPLIER = 0x9E3779B97F4A7C15
"""2^64 over the golden ratio, odd: Fibonacci hashing (Knuth, vol. 3, section 6.4)."""


@dataclass(frozen=True, slots=True)
class Arm:
    """One shadow cache: whose order, and how large the cache is that it stands for."""

    make: Callable[[], Policy]
    tokens: int
    whole_nodes: bool = False


class Picked(NamedTuple):
    """What of a request is in the sample."""

    blocks: tuple[int, ...]
    prompt_tokens: int
    """Prompt tokens that the sampled blocks stand for."""


class Sample(NamedTuple):
    """One request in every shadow cache."""

    blocks: tuple[int, ...]
    prompt_tokens: int
    hit_blocks: dict[Hashable, int]
    """How many leading ones of ``blocks`` each cache had."""
    saved_tokens: dict[Hashable, int]
    """Prompt tokens that these stand for."""


def block_number(block: int) -> int:
    """A number from 0 to 2^32 - 1 for a block's id, such that neighbouring ids fall apart."""
    return (block * _MULTIPLIER & _MASK) >> 32


def covered_tokens(request: Request) -> int:
    """Prompt tokens that are in the blocks of a request's path."""
    return min(request.prompt_tokens, len(request.path) * request.block_tokens)


class SampledCaches:
    """Shadow caches by name. ``one_in``: of so many blocks one is sampled; ``None`` starts with all
    and doubles whenever a minute has had more than ``most_work_per_s``.
    """

    def __init__(self, one_in: int | None = None, most_work_per_s: float = MOST_WORK_PER_S) -> None:
        self.one_in = one_in or 1
        self.seen = 0
        """Requests with a block in the sample."""
        self.requests_per_s = 0.0
        """Requests a second, in the minute before this one."""
        self._arms: dict[Hashable, Arm] = {}
        self._caches: dict[Hashable, ShadowCache] = {}
        self._largest = 0
        """Tokens of the largest cache that one stands for."""
        self._thins = one_in is None
        self._most_work_per_s = most_work_per_s
        self._counted_from = -math.inf
        self._requests, self._visits, self._request_blocks = 0, 0, 0

    def add(self, name: Hashable, arm: Arm) -> None:
        """Another cache, empty. One of the same name and size is left as it is."""
        old = self._arms.get(name)
        if old is not None and old.tokens == arm.tokens:
            return
        self._arms[name] = arm
        self._largest = max(one.tokens for one in self._arms.values())
        self._caches.pop(name, None)

    def remove(self, names: Iterable[Hashable]) -> None:
        """Forget these caches, where they are."""
        for name in names:
            self._arms.pop(name, None)
            self._caches.pop(name, None)

    def samples(self, block: int) -> bool:
        """Whether a block, by its id, is in the sample."""
        return block_number(block) % self.one_in == 0

    def pick(self, request: Request) -> Picked | None:
        """What of a request that has ended is in the sample; ``None`` where no block is.

        Call it once for each request: what it costs is counted here. Its path is extended over the
        output where that is known.
        """
        if not self._arms or not request.path:
            return None
        self._thin_out(request)
        n, path, tokens = self.one_in, request.path, request.block_tokens
        of_prompt = -(-request.prompt_tokens // tokens)
        if n == 1:
            return Picked(tuple(path), covered_tokens(request))
        blocks = self.sampled(path[:of_prompt])
        tokens_of_prompt = len(blocks) * tokens
        if of_prompt <= len(path) and blocks and blocks[-1] == path[of_prompt - 1]:
            tokens_of_prompt -= (
                of_prompt * tokens - request.prompt_tokens
            )  # the last is not full of prompt
        blocks += self.sampled(path[of_prompt:])
        return Picked(tuple(blocks), n * tokens_of_prompt) if blocks else None

    def serve(self, copy: Request, picked: Picked) -> Sample:
        """Serve what was picked of a request in every cache. ``copy`` (``as_sampled``) is used up."""
        copy.path = picked.blocks
        copy.block_tokens *= self.one_in
        tokens_of_prompt = picked.prompt_tokens
        hits = {name: self._cache(name, copy).access(copy) for name in self._arms}
        saved = {name: min(hit * copy.block_tokens, tokens_of_prompt) for name, hit in hits.items()}
        self.seen += 1
        self._visits += len(self._arms)
        return Sample(picked.blocks, tokens_of_prompt, hits, saved)

    def has_evicted(self, name: Hashable) -> bool:
        """Whether a cache has been full; before, every order hits the same."""
        cache = self._caches.get(name)
        return cache is not None and cache.has_evicted

    def blocks(self) -> dict[Hashable, int]:
        """Sampled blocks that each cache holds."""
        return {name: len(cache) for name, cache in self._caches.items()}

    def sampled(self, path: Sequence[int]) -> list[int]:
        """The blocks of a path that are in the sample."""
        n = self.one_in  # block_number, written out: this runs for every block of every request
        if n & (n - 1) == 0:
            bits = n - 1 << 32
            return [b for b in path if not b * _MULTIPLIER & bits]
        return [b for b in path if ((b * _MULTIPLIER & _MASK) >> 32) % n == 0]

    def _cache(self, name: Hashable, request: Request) -> ShadowCache:
        cache = self._caches.get(name)
        if cache is None:
            arm = self._arms[name]
            block_tokens = request.block_tokens // self.one_in
            cache = self._caches[name] = ShadowCache(
                arm.make(), arm.tokens, block_tokens, self.one_in, arm.whole_nodes
            )
        return cache

    def _thin_out(self, request: Request) -> None:
        """Halve the sample when there is more work, or the caches have more blocks, than allowed."""
        now = request.time
        if not self._requests:
            self._counted_from = now
        self._requests += 1
        self._request_blocks += len(request.path)
        span = max(_SAMPLE_S, now - self._counted_from)
        most = max(LEAST_WORK_PER_S, self._most_work_per_s - OBSERVE_WORK * self._requests / span)
        large = self._largest > self.one_in * MOST_BLOCKS * request.block_tokens
        dense = self._visits > most * span
        if self._thins and (dense or large):
            self.one_in = max(2 * self.one_in, self._enough(now) if dense else 0)
            for name, cache in self._caches.items():
                cache.thin_out(self._arms[name].make(), self.one_in, self.samples)
        elif now - self._counted_from < _SAMPLE_S:
            return
        self.requests_per_s = self._requests / max(_BURST_S, now - self._counted_from)
        self._requests = self._visits = self._request_blocks = 0

    def _enough(self, now: float) -> int:
        """Of how many blocks one must be sampled, a power of 2, so that requests as those of this
        minute are as little work as allowed. Halving alone would take minutes: a prompt of L blocks
        is served with probability 1 - (1 - 1/N)^L."""
        per_s = self._requests / max(_BURST_S, now - self._counted_from)
        most = max(LEAST_WORK_PER_S, self._most_work_per_s - OBSERVE_WORK * per_s)
        share = min(0.99, most / (per_s * len(self._arms)))
        blocks = self._request_blocks / self._requests
        return int(2 ** math.floor(math.log2(max(1.0, blocks / -math.log(1.0 - share)))))
