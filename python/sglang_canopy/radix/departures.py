"""Causes of missed prompt tokens, from the history of each block of earlier prompts.

A bounded map holds the latest fact of each block: the request that computes it, or its eviction from the
tiers. Evictions are reported by ``TierTraffic.record_eviction``. A request is looked up when it is
admitted, in the state in which SGLang matched it. Only stamps, paths and tree operations are used, so all
tensor-parallel ranks agree, with one exception: each rank asks its own disk whether it holds a page.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from sglang_canopy.radix.counters import DEVICE, DISK, HOST
from sglang_canopy.radix.missed import (
    EVICTED,
    FLUSHED,
    IN_FLIGHT,
    LATE,
    NEVER_SEEN,
    NO_TIER,
    NOT_WRITTEN,
    PARTIAL_PAGE,
    UNKNOWN,
    BlockMap,
    CauseAndTier,
    ComputingRequest,
    Departure,
    MissTotals,
    RequestMisses,
    TierEviction,
    scale_to_total,
    tier_name,
)

if TYPE_CHECKING:
    from sglang_canopy.radix.disk_tier import DiskTier
    from sglang_canopy.radix.live import LivePolicies
    from sglang_canopy.radix.live_request import LiveRequest, NodeLeaf

BLOCKS_PER_CACHED_BLOCK = 4
"""Number of remembered blocks, as a multiple of the blocks in device and host."""
MIN_BLOCKS, MAX_BLOCKS = 4096, 1 << 18
"""Fewest and most entries of the map, about 120 bytes each."""
MAX_UNSAMPLED_BLOCKS = 1 << 14
"""Remembered blocks up to which every block is recorded."""
MIN_SAMPLE_STRIDE = 8
"""Beyond that, one block in this many is recorded, or in more. With blocks of 64 tokens, 1.5 million new prompt tokens
a second then take 0.5 % of the thread; 0.7 million if every block is recorded."""
_NEW, _IN_FLIGHT, _PARTIAL = (NEVER_SEEN, NO_TIER), (IN_FLIGHT, NO_TIER), (PARTIAL_PAGE, NO_TIER)


class Departures:
    """History of one tree's blocks, and the sums of its misses. ``live``: sizes of the tiers. ``disk``:
    the tier below the host."""

    def __init__(
        self, block_tokens: int, page_tokens: int, live: LivePolicies, disk: DiskTier
    ) -> None:
        self.block_tokens, self.page_tokens = block_tokens, page_tokens
        self.totals = MissTotals()
        self.sample_stride = 0
        """One block in this many is remembered; the causes of the rest are inferred from it. 0: fixed
        by the cache's size at the first request."""
        self.corrected_tokens = 0
        """Tokens whose cause at admission was wrong or unknown."""
        self._live, self._disk = live, disk
        self._blocks = BlockMap(MIN_BLOCKS)
        self._evicted_tokens = 0
        self._last_cause: CauseAndTier = _NEW

    @property
    def _capacity(self) -> int:
        """Token capacity of device and host."""
        return self._live.device_tokens + self._live.host_tokens

    # ---- evicted nodes ----

    def record_eviction(
        self, eviction: TierEviction, path: Sequence[int], page: str | None
    ) -> None:
        """Record tokens that left a tier and are in no other tier of the tree. ``path``: block hashes
        of their path. ``page``: the name of their last page, if it was written to the disk."""
        self._evicted_tokens += eviction.tokens
        cause, tier = EVICTED, eviction.tier
        if page is not None:
            cause, tier = LATE, DISK
        elif self._live.host_tokens if tier == DEVICE else self._disk.active:
            cause, tier = NOT_WRITTEN, tier + 1
        fact = Departure(cause, tier, self._evicted_tokens, page)
        self._put(path, eviction.offset, eviction.tokens, fact)

    def record_flush(self, leaf: NodeLeaf, tokens: int, page: str | None) -> None:
        """Record that the tree is emptied while it holds ``leaf``; ``page`` as in ``record_eviction``."""
        cause, tier = (FLUSHED, DEVICE) if page is None else (LATE, DISK)
        fact = Departure(cause, tier, self._evicted_tokens, page)
        self._put(leaf.path, leaf.offset, tokens, fact)

    def _put(self, path: Sequence[int], offset: int, tokens: int, fact: Departure) -> None:
        """Record ``fact`` for the blocks of ``tokens`` at ``offset`` of ``path``."""
        size = self.block_tokens
        blocks = self._sample(path[offset // size : (offset + tokens) // size])
        if blocks:
            self._blocks.put(blocks, fact)

    # ---- admission, writes and end of requests ----

    def classify_misses(
        self, request: LiveRequest, cached_tokens: int, late_tokens: int = 0
    ) -> None:
        """Record that ``request`` found ``cached_tokens`` of its prompt tokens and computes the rest.
        ``late_tokens``: the following tokens that the host holds but does not load."""
        if not self.sample_stride:
            self._fix_sample()
        misses = request.misses = RequestMisses(cached_tokens)
        position = cached_tokens
        if late_tokens > 0 and position < request.prompt_tokens:
            late_tokens = min(late_tokens, request.prompt_tokens - position)
            misses.add((LATE, tier_name(HOST)), late_tokens)
            position += late_tokens
        if position < request.prompt_tokens:
            self._classify(request, misses, position)

    def _classify(self, request: LiveRequest, misses: RequestMisses, position: int) -> None:
        """Add the causes of the prompt tokens from ``position`` on. Blocks that are not sampled share the next
        one's cause, or the last one's."""
        size, path, prompt_tokens = self.block_tokens, request.path, request.prompt_tokens
        full_blocks = min(len(path), prompt_tokens // size)
        first_block = min(position // size, full_blocks)
        blocks = path[first_block:full_blocks]
        mask, cause = self.sample_stride - 1, None  # a power of two less one; ids are hashes
        (get_new, get_old), run_fact, run_start = self._blocks.getters(), None, position
        for end, block in enumerate(blocks, first_block + 1):
            if block & mask:
                continue
            fact = get_new(block) or get_old(block)
            if fact is not run_fact or (type(fact) is ComputingRequest and cause != _IN_FLIGHT):
                if position > run_start:
                    misses.add_block(cause or _NEW, run_fact, position - run_start)
                cause, run_fact, run_start = (
                    self._cause(fact, end * size, prompt_tokens),
                    fact,
                    position,
                )
            if fact is None:  # and so are the blocks behind it
                cause = _NEW
                break
            position = end * size
        if position > run_start:
            misses.add_block(cause or _NEW, run_fact, position - run_start)
        if position < full_blocks * size:
            misses.add(self._last_cause if cause is None else cause, full_blocks * size - position)
            position = full_blocks * size
        if position < prompt_tokens:
            # Tokens after the last whole block are as new as that block, or belong to no whole
            # page.
            is_inherited = cause in (_NEW, _IN_FLIGHT)
            misses.add(cause if cause and is_inherited else _PARTIAL, prompt_tokens - position)
        self._last_cause = cause or self._last_cause
        blocks = self._sample(blocks)
        if blocks:
            self._blocks.put(blocks, misses.computing)

    def _cause(
        self, fact: ComputingRequest | Departure | None, end: int, prompt_tokens: int
    ) -> CauseAndTier:
        """Return the cause of a missed block that ends after ``end`` tokens."""
        if fact is None:
            return _NEW
        if type(fact) is Departure:
            if fact.cause == LATE and not self._disk.holds(fact.page or ""):
                return EVICTED, tier_name(DISK)
            if fact.cause == FLUSHED:
                return FLUSHED, NO_TIER
            return fact.cause, tier_name(fact.tier)
        assert type(fact) is ComputingRequest
        if end > fact.written_tokens:
            if fact.is_running:
                return _IN_FLIGHT
            if end - fact.written_tokens >= self.page_tokens + self.block_tokens:
                return NOT_WRITTEN, tier_name(DEVICE)
            return _PARTIAL
        # The last token is always computed, together with its page.
        if end > (prompt_tokens - 1) // self.page_tokens * self.page_tokens:
            return _PARTIAL
        return UNKNOWN, NO_TIER

    def record_written(self, request: LiveRequest, tokens: int) -> None:
        """Record that the first ``tokens`` of the path of ``request`` are in the tree."""
        misses = request.misses
        if misses is not None and tokens > misses.computing.written_tokens:
            misses.computing.written_tokens = tokens

    def count_misses(self, request: LiveRequest, hits: int) -> None:
        """Record the end of ``request``; ``hits``: its prompt tokens found in any tier."""
        misses, request.misses = request.misses, None
        if misses is None:
            misses = RequestMisses(hits)
        misses.computing.is_running = False
        sums, missed_tokens = misses.sums, max(0, request.prompt_tokens - hits)
        misjudged_tokens = missed_tokens - sum(sums.values())
        if misjudged_tokens:
            self.corrected_tokens += abs(misjudged_tokens)
            sums = scale_to_total(sums, missed_tokens)
        self.totals.add(sums)
        for eviction, tokens in misses.evicted_runs:
            self.totals.add_evicted(eviction, tokens, self._evicted_tokens, self._capacity)

    def stats(self) -> dict[str, Any]:
        """Return all sums as plain data."""
        return {
            **self.totals.stats(),
            "one_block_in": self.sample_stride,
            "corrected_tokens": self.corrected_tokens,
        }

    # ---- bounds ----

    def _sample(self, blocks: Sequence[int]) -> Sequence[int]:
        """Return those of ``blocks`` that are recorded."""
        mask = self.sample_stride - 1
        return [block for block in blocks if not block & mask] if mask else blocks

    def _fix_sample(self) -> None:
        """Fix the sample and the map's size by the size of the cache."""
        self.sample_stride = 1
        blocks = BLOCKS_PER_CACHED_BLOCK * self._capacity // self.block_tokens
        if blocks > MAX_UNSAMPLED_BLOCKS:
            self.sample_stride = MIN_SAMPLE_STRIDE
        while blocks > MAX_BLOCKS * self.sample_stride:
            self.sample_stride *= 2
        self._blocks.limit = max(blocks // self.sample_stride, MIN_BLOCKS)
