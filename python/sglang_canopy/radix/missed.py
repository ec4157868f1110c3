"""Causes of missed prompt tokens: of one request, and sums by cause."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

from sglang_canopy.radix.counters import DEVICE, DISK, HOST, TIERS

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

CauseAndTier = tuple[str, str]
MissedTokens = dict[CauseAndTier, int]


class TierEviction(NamedTuple):
    """An eviction from a tier, and the state of its tokens at that time."""

    time: float
    """Seconds on the requests' clock."""
    tier: int
    tenant: str | None
    conversation: Hashable | None
    category: str
    offset: int
    tokens: int
    reason: int
    """Index of ``counters.REASONS``."""
    policy: str
    """The policy that chose the tokens."""
    idle_s: float
    """Seconds since the tokens were last used."""
    demoted: bool
    """Whether the tier below still has them."""


class Departure(NamedTuple):
    """A run of tokens that left its last tier, or all tiers except the disk."""

    cause: str
    """``EVICTED``, ``NOT_WRITTEN``, ``FLUSHED``, or ``LATE`` if the disk has it."""
    tier: int
    evicted_before: int
    """Total tokens evicted before it."""
    page: str | None = None
    """Name of its last page on the disk."""


class MissTotals:
    """Sums of misses. The scheduler's thread fills it; any thread may call ``stats``."""

    def __init__(self) -> None:
        self.sums: Counter[CauseAndTier] = Counter()
        self.hits_with_memory = dict.fromkeys(MEMORY_SCALES, 0)
        """Missed tokens that a cache of that size would still hold."""

    def add(self, sums: MissedTokens) -> None:
        """Add the misses of a finished request."""
        for key, tokens in sums.items():
            self.sums[key] += tokens

    def add_evicted(
        self, departure: Departure, tokens: int, evicted_tokens: int, capacity_tokens: int
    ) -> None:
        """Record missed ``tokens`` of ``departure``. ``evicted_tokens``: of all evictions so far."""
        evicted_since = evicted_tokens - departure.evicted_before
        for scale in MEMORY_SCALES:
            if evicted_since <= (scale - 1) * capacity_tokens:
                self.hits_with_memory[scale] += tokens

    def stats(self) -> dict[str, Any]:
        """Return all sums as plain data."""
        tokens: dict[str, dict[str, int]] = {}
        for (cause, tier), count in sorted(self.sums.copy().items()):
            tokens.setdefault(cause, {})[tier] = count
        return {
            "tokens": tokens,
            "hits_with_memory": {f"x{s:g}": n for s, n in self.hits_with_memory.items()},
        }


def tier_name(tier: int) -> str:
    return TIERS[tier] if tier in (DEVICE, HOST, DISK) else NO_TIER


class ComputingRequest:
    """A request that is computing blocks, or was."""

    __slots__ = ("is_running", "written_tokens")

    def __init__(self) -> None:
        self.is_running = True
        self.written_tokens = 0
        """Number of tokens of its path that are in the tree."""


class RequestMisses:
    """Causes of one request's misses, from its admission to its end."""

    __slots__ = ("cached_tokens", "computing", "evicted_runs", "sums")

    def __init__(self, cached_tokens: int) -> None:
        self.cached_tokens = cached_tokens
        """Number of tokens that the request found."""
        self.sums: MissedTokens = {}
        self.evicted_runs: list[tuple[Departure, int]] = []
        self.computing = ComputingRequest()

    def add(self, key: CauseAndTier, tokens: int) -> None:
        self.sums[key] = self.sums.get(key, 0) + tokens

    def add_block(
        self, key: CauseAndTier, fact: ComputingRequest | Departure | None, tokens: int
    ) -> None:
        """Add tokens of a block, of which ``fact`` is the latest."""
        self.sums[key] = self.sums.get(key, 0) + tokens
        cause, _ = key
        if cause == EVICTED and type(fact) is Departure:
            last_departure, last_tokens = self.evicted_runs[-1] if self.evicted_runs else (None, 0)
            if last_departure is fact:
                self.evicted_runs.pop()
                tokens += last_tokens
            self.evicted_runs.append((fact, tokens))


GetFact = Callable[[int], ComputingRequest | Departure | None]


class BlockMap:
    """Bounded map from a block's hash to its latest fact: its departure, or the request that computes
    it. Two generations: a full one replaces the older."""

    __slots__ = ("_dropped", "_new", "_old", "limit")

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._new: dict[int, ComputingRequest | Departure] = {}
        self._old: dict[int, ComputingRequest | Departure] = {}
        self._dropped: dict[int, ComputingRequest | Departure] = {}

    def __len__(self) -> int:
        return len(self._new) + len(self._old)

    def get(self, block: int) -> ComputingRequest | Departure | None:
        return self._new.get(block) or self._old.get(block)

    def getters(self) -> tuple[GetFact, GetFact]:
        """Return ``get`` of each generation, for loops."""
        return self._new.get, self._old.get

    def put(self, blocks: Sequence[int], fact: ComputingRequest | Departure) -> None:
        """Set the fact of ``blocks``. A dropped generation is freed gradually, to avoid a pause."""
        self._new.update(dict.fromkeys(blocks, fact))
        if self._dropped:
            drop = self._dropped.popitem
            for _ in range(min(2 * len(blocks), len(self._dropped))):
                drop()
        if len(self._new) >= self.limit // 2:
            self._dropped, self._old, self._new = self._old, self._new, {}


def scale_to_total(sums: MissedTokens, total: int) -> MissedTokens:
    """Scale ``sums`` to ``total`` tokens, which may differ from the count at admission."""
    excess = sum(sums.values()) - total
    if not excess:
        return sums
    reduced = dict(sums)
    if excess < 0:
        reduced[UNKNOWN, NO_TIER] = reduced.get((UNKNOWN, NO_TIER), 0) - excess
        return reduced
    for key in list(reduced):
        taken = min(excess, reduced[key])
        reduced[key] -= taken
        excess -= taken
    return {key: tokens for key, tokens in reduced.items() if tokens}
