"""Causes of missed prompt tokens, from the history of each block of earlier prompts.

A bounded map holds the latest fact of each block: the request that computes it, or its departure from the
tiers. A request is looked up when it is admitted, in the state in which SGLang matched it. Only stamps, paths
and tree operations are used, so all tensor-parallel ranks agree, with one exception: each rank asks its own
disk whether it holds a page.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple

from sglang_canopy.radix.counters import DEVICE, DISK, HOST, TIERS
from sglang_canopy.radix.live_request import CauseAndTier, RequestMisses, TokensByCause

if TYPE_CHECKING:
    from sglang_canopy.radix.disk_tier import DiskTier
    from sglang_canopy.radix.live import LivePolicies
    from sglang_canopy.radix.live_request import LiveRequest, NodeLeaf

NEVER_SEEN = "never_seen"
EVICTED = "evicted"
NOT_WRITTEN = "not_written"
LATE = "late"
IN_FLIGHT = "in_flight"
FLUSHED = "flushed"
PARTIAL_PAGE = "partial_page"
UNKNOWN = "unknown"
"""Causes for which a prompt token was computed.

``never_seen``: no earlier request had it here. ``evicted``: it left ``tier``, the last that held
it. ``not_written``: it left the tier above before ``tier`` had a copy, or its request ended before
it was cached. ``late``: ``tier`` held it and did not deliver it. ``in_flight``: a running request
was computing it. ``flushed``: the cache was emptied. ``partial_page``: only whole pages are cached,
and the last token is always computed. ``unknown``: none of these, such as a lookup that could not
end there (windows, states), or a dropped record.
"""

NO_TIER = "none"
"""Tier of causes without a tier."""
MEMORY_SCALES = (1.25, 1.5, 2.0, 4.0)
"""Relative cache sizes with an estimate of their hits."""
BLOCKS_PER_CACHED_BLOCK = 4
"""Number of remembered blocks, as a multiple of the blocks in device and host."""
MIN_BLOCKS, MAX_BLOCKS = 4096, 1 << 16
"""Fewest and most entries of the map, about 120 bytes each."""
MAX_UNSAMPLED_BLOCKS = 1 << 14
"""Remembered blocks up to which every block is recorded."""
MIN_SAMPLE_STRIDE = 8
"""Beyond that, one block in this many is recorded, or in more."""

_NEW, _IN_FLIGHT, _PARTIAL = (NEVER_SEEN, NO_TIER), (IN_FLIGHT, NO_TIER), (PARTIAL_PAGE, NO_TIER)


class Departure(NamedTuple):
    """A run of tokens that left its last tier, or all tiers except the disk."""

    cause: str
    """``EVICTED``, ``NOT_WRITTEN``, ``FLUSHED``, or ``LATE`` if the disk has it."""
    tier: int
    evicted_before: int
    """Total tokens evicted before it."""
    page: str | None = None
    """Name of its last page on the disk."""


BlockFact = RequestMisses | Departure


class BlockMap:
    """Bounded map from a block's hash to its latest fact. Two generations: a full one replaces the older."""

    __slots__ = ("_new", "_old", "limit")

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._new: dict[int, BlockFact] = {}
        self._old: dict[int, BlockFact] = {}

    def __len__(self) -> int:
        return len(self._new) + len(self._old)

    def get(self, block: int) -> BlockFact | None:
        return self._new.get(block) or self._old.get(block)

    def put(self, blocks: Sequence[int], fact: BlockFact) -> None:
        """Set the fact of ``blocks``."""
        self._new.update(dict.fromkeys(blocks, fact))
        if len(self._new) >= self.limit // 2:
            self._old, self._new = self._new, {}


class MissedTokens:
    """History of one tree's blocks, and the sums of its misses. The scheduler's thread fills it; any thread
    may call ``stats``. ``live``: sizes of the tiers. ``disk``: the tier below the host."""

    def __init__(
        self, block_tokens: int, page_tokens: int, live: LivePolicies, disk: DiskTier
    ) -> None:
        self.block_tokens, self.page_tokens = block_tokens, page_tokens
        self.tokens: TokensByCause = {}
        self.sample_stride = 0
        """One block in this many is remembered; the causes of the rest are inferred from it. 0: fixed
        by the cache's size at the first request."""
        self.corrected_tokens = 0
        """Tokens whose cause at admission was wrong or unknown."""
        self._tokens_by_scale = [0] * len(MEMORY_SCALES)
        self._live, self._disk = live, disk
        self._blocks = BlockMap(MIN_BLOCKS)
        self._evicted_tokens = 0
        self._last_cause: CauseAndTier = _NEW

    # ---- departures from the tiers ----

    def record_eviction(self, tier: int, leaf: NodeLeaf, tokens: int, page: str | None) -> None:
        """Record that the ``tokens`` of ``leaf`` left ``tier`` and are in no other tier of the tree. ``page``:
        the name of their last page, if it was written to the disk."""
        self._evicted_tokens += tokens
        cause = EVICTED
        has_lower_tier = self._live.host_tokens if tier == DEVICE else self._disk.active
        if page is not None:
            cause, tier = LATE, DISK
        elif has_lower_tier:
            cause, tier = NOT_WRITTEN, tier + 1
        self._put(leaf, tokens, Departure(cause, tier, self._evicted_tokens, page))

    def record_flush(self, leaf: NodeLeaf, tokens: int, page: str | None) -> None:
        """Record that the tree is emptied while it holds ``leaf``; ``page`` as in ``record_eviction``."""
        cause, tier = (FLUSHED, DEVICE) if page is None else (LATE, DISK)
        self._put(leaf, tokens, Departure(cause, tier, self._evicted_tokens, page))

    def _put(self, leaf: NodeLeaf, tokens: int, fact: Departure) -> None:
        """Record ``fact`` for the blocks of the ``tokens`` of ``leaf``."""
        size, offset = self.block_tokens, leaf.offset
        blocks = self._sample(leaf.path[offset // size : (offset + tokens) // size])
        if blocks:
            self._blocks.put(blocks, fact)

    # ---- admission, writes and end of requests ----

    def classify(self, request: LiveRequest, cached_tokens: int, late_tokens: int = 0) -> None:
        """Record that ``request`` found ``cached_tokens`` of its prompt and computes the rest, of which the
        host holds ``late_tokens`` and does not load them."""
        if not self.sample_stride:
            self._fix_sample()
        misses = request.misses = RequestMisses()
        late_tokens = max(0, min(late_tokens, request.prompt_tokens - cached_tokens))
        misses.add((LATE, TIERS[HOST]), late_tokens)
        position = cached_tokens + late_tokens
        if position < request.prompt_tokens:
            self._classify_blocks(request, misses, position)

    def _classify_blocks(self, request: LiveRequest, misses: RequestMisses, position: int) -> None:
        """Add the causes of the prompt tokens from ``position`` on. Blocks that are not sampled share the next
        one's cause, or the last one's."""
        size, path, prompt_tokens = self.block_tokens, request.path, request.prompt_tokens
        full_blocks = min(len(path), prompt_tokens // size)
        first_block = min(position // size, full_blocks)
        blocks = path[first_block:full_blocks]
        mask, get = self.sample_stride - 1, self._blocks.get  # a power of two less one
        cause, last_fact, scale_index = None, None, None
        for end, block in enumerate(blocks, first_block + 1):
            if block & mask:  # blocks are hashes
                continue
            fact = get(block)
            if fact is None:  # and so are the blocks behind it
                cause = _NEW
                break
            if fact is not last_fact or type(fact) is RequestMisses:
                cause, last_fact = self._cause(fact, end * size, prompt_tokens), fact
                scale_index = None
                if type(fact) is Departure and cause[0] == EVICTED:
                    scale_index = self._scale_index(fact)
            tokens, position = end * size - position, end * size
            misses.add(cause or _NEW, tokens)
            if scale_index is not None:
                by_scale = misses.tokens_by_scale
                by_scale[scale_index] = by_scale.get(scale_index, 0) + tokens
        misses.add(cause or self._last_cause, full_blocks * size - position)
        # Tokens after the last whole block are as new as that block, or belong to no whole page.
        is_inherited = cause in (_NEW, _IN_FLIGHT)
        rest_tokens = prompt_tokens - max(position, full_blocks * size)
        misses.add(cause if cause and is_inherited else _PARTIAL, rest_tokens)
        self._last_cause = cause or self._last_cause
        blocks = self._sample(blocks)
        if blocks:
            self._blocks.put(blocks, misses)

    def _cause(self, fact: BlockFact, end: int, prompt_tokens: int) -> CauseAndTier:
        """Return the cause of a missed block that ends after ``end`` tokens."""
        if type(fact) is Departure:
            if fact.cause == LATE and not self._disk.holds(fact.page or ""):
                return EVICTED, TIERS[DISK]
            return fact.cause, NO_TIER if fact.cause == FLUSHED else TIERS[fact.tier]
        assert type(fact) is RequestMisses
        if end > fact.written_tokens:
            if fact.is_running:
                return _IN_FLIGHT
            if end - fact.written_tokens >= self.page_tokens + self.block_tokens:
                return NOT_WRITTEN, TIERS[DEVICE]
            return _PARTIAL
        # The last token is always computed, together with its page.
        if end > (prompt_tokens - 1) // self.page_tokens * self.page_tokens:
            return _PARTIAL
        return UNKNOWN, NO_TIER

    def _scale_index(self, fact: Departure) -> int | None:
        """Return the index of the smallest of ``MEMORY_SCALES`` that had avoided ``fact``, if any."""
        capacity = self._live.device_tokens + self._live.host_tokens
        evicted_since = self._evicted_tokens - fact.evicted_before
        index = bisect_left(MEMORY_SCALES, 1 + evicted_since / capacity)
        return index if index < len(MEMORY_SCALES) else None

    def record_written(self, request: LiveRequest, tokens: int) -> None:
        """Record that the first ``tokens`` of the path of ``request`` are in the tree."""
        misses = request.misses
        if misses is not None and tokens > misses.written_tokens:
            misses.written_tokens = tokens

    def count_misses(self, request: LiveRequest, hits: int) -> None:
        """Record the end of ``request``; ``hits``: its prompt tokens found in any tier."""
        misses, request.misses = request.misses or RequestMisses(), None
        missed_tokens = max(0, request.prompt_tokens - hits)
        self.corrected_tokens += abs(missed_tokens - sum(misses.tokens_by_cause.values()))
        for key, tokens in scale_to_total(misses.tokens_by_cause, missed_tokens).items():
            self.tokens[key] = self.tokens.get(key, 0) + tokens
        for index, tokens in misses.tokens_by_scale.items():
            self._tokens_by_scale[index] += tokens
        misses.end()

    def stats(self) -> dict[str, Any]:
        """Return all sums as plain data."""
        tokens: dict[str, dict[str, int]] = {}
        for (cause, tier), count in sorted(self.tokens.copy().items()):
            tokens.setdefault(cause, {})[tier] = count
        hits = zip(MEMORY_SCALES, accumulate(self._tokens_by_scale), strict=True)
        return {
            "tokens": tokens,
            "hits_with_memory": {f"x{scale:g}": count for scale, count in hits},
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
        cached_blocks = (self._live.device_tokens + self._live.host_tokens) // self.block_tokens
        blocks = BLOCKS_PER_CACHED_BLOCK * cached_blocks
        self.sample_stride = MIN_SAMPLE_STRIDE if blocks > MAX_UNSAMPLED_BLOCKS else 1
        while blocks > MAX_BLOCKS * self.sample_stride:
            self.sample_stride *= 2
        self._blocks.limit = max(blocks // self.sample_stride, MIN_BLOCKS)


def scale_to_total(tokens_by_cause: TokensByCause, total: int) -> TokensByCause:
    """Scale the sums to ``total`` tokens, which may differ from the count at admission."""
    scaled = dict(tokens_by_cause)
    excess = sum(scaled.values()) - total
    if excess < 0:
        scaled[UNKNOWN, NO_TIER] = scaled.get((UNKNOWN, NO_TIER), 0) - excess
    for key, tokens in tokens_by_cause.items():
        removed = max(0, min(excess, tokens))
        scaled[key] -= removed
        excess -= removed
    return {key: tokens for key, tokens in scaled.items() if tokens}
