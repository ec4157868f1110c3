"""Causes of missed prompt tokens, from the history of each block of earlier prompts.

A bounded map holds the latest fact of each block: the request that computes it, or its eviction
from the tiers. Evictions are reported by ``Traffic.left``. A request is looked up when it is
admitted, in the state in which SGLang matched it. Only stamps, paths and tree operations are used,
so all tensor-parallel ranks agree, with one exception: each rank asks its own disk whether it holds
a page.
"""

from __future__ import annotations

from array import array
from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING, Any

import xxhash

from sglang_canopy.radix.counters import DEVICE, DISK, HOST
from sglang_canopy.radix.missed import (
    EVICTED,
    FLUSHED,
    IN_FLIGHT,
    LATE,
    NEVER_SEEN,
    NO_TIER,
    NOT_WRITTEN,
    OTHER_NAMESPACE,
    PARTIAL_PAGE,
    UNKNOWN,
    BlockMap,
    Decision,
    Key,
    Left,
    Missed,
    Misses,
    Visit,
    fitted,
    tier_name,
)

if TYPE_CHECKING:
    from sglang_canopy.radix.disk_tier import DiskTier
    from sglang_canopy.radix.live import LiveCache
    from sglang_canopy.radix.live_request import LiveRequest, NodeLeaf

TIMES_THE_CACHE = 4
"""Number of remembered blocks, as a multiple of the blocks in device and host."""
MIN_BLOCKS = 4096
MAX_BLOCKS = 1 << 18
"""Most entries of the map, about 120 bytes each; with more, blocks are sampled by number."""
MAX_TOKENS_PER_S = 1e5
"""Recorded prompt tokens a second that halve the sample."""
CALM = 0.25
"""Share of it below which the sample doubles again."""
RECORDED_S = 3600.0
"""Maximum seconds before the doubled sample is used, unless the map holds nothing older."""
MAX_ONE_IN = 64
MAX_PENDING = 1024
"""Maximum evictions waiting to be recorded."""
_WINDOW_S = 10.0
_NEW, _IN_FLIGHT, _PARTIAL = (NEVER_SEEN, NO_TIER), (IN_FLIGHT, NO_TIER), (PARTIAL_PAGE, NO_TIER)


class Departures:
    """History of one tree's blocks, and the sums of its misses.

    ``live``: sizes of the tiers. ``disk``: the tier below the host.
    """

    def __init__(
        self, block_tokens: int, page_tokens: int, live: LiveCache, disk: DiskTier
    ) -> None:
        self.block_tokens, self.page_tokens = block_tokens, page_tokens
        self.missed = Missed()
        self.one_in = 1
        """One block in this many is remembered; the causes of the rest are inferred from it."""
        self._finer_since: tuple[int, float] | None = None
        """Turn of the map, and time, from which the doubled sample is recorded but not used."""
        self.corrected_tokens = 0
        """Tokens whose cause at admission was wrong or unknown."""
        self._live, self._disk = live, disk
        self._pending: list[tuple[Decision, Sequence[int], str | None]] = []
        self._blocks = BlockMap(MIN_BLOCKS)
        self._evicted_tokens = 0
        self._admitted_last = "default"
        self._last: Key = _NEW
        self._window = (0.0, 0)
        self._namespaces: set[Hashable] = set()
        """The first two namespaces."""
        self._plain = BlockMap(MIN_BLOCKS)
        """Blocks hashed without a namespace, each with the visit that first computed it."""

    @property
    def _capacity(self) -> int:
        """Token capacity of device and host."""
        return self._live.device_tokens + self._live.host_tokens

    # ---- evicted nodes ----

    def left(self, decision: Decision, path: Sequence[int], page: str | None) -> None:
        """Record tokens that left a tier and are in no other tier of the tree.

        ``path``: block hashes of their path. ``page``: the name of their last page, if it was
        written to the disk. The record is processed when the next request is admitted.
        """
        self._pending.append((decision, path, page))
        if len(self._pending) > MAX_PENDING:
            self._settle()

    def flushed(self, leaf: NodeLeaf, tokens: int, now: float, page: str | None) -> None:
        """Record that the tree is emptied while it holds ``leaf``; ``page`` as in ``left``."""
        self._settle()
        decision = Decision(
            now, DEVICE, leaf.tenant, leaf.conversation, leaf.category, leaf.offset, tokens, 0, "",
            now - leaf.last_access, False,
        )  # fmt: skip
        cause, tier = (FLUSHED, DEVICE) if page is None else (LATE, DISK)
        self._depart(decision, leaf.path, cause, tier, page)

    def _settle(self) -> None:
        """Process the evictions since the last admitted request."""
        below = (HOST if self._live.host_tokens else None, DISK if self._disk.active else None)
        for decision, path, page in self._pending:
            tier = decision.tier
            self._evicted_tokens += decision.tokens
            if page is not None:
                self._depart(decision, path, LATE, DISK, page)
            elif below[tier] is None:
                self._depart(decision, path, EVICTED, tier, None)
            else:
                self._depart(decision, path, NOT_WRITTEN, tier + 1, None)
        self._pending.clear()

    def _depart(
        self, decision: Decision, path: Sequence[int], cause: str, tier: int, page: str | None
    ) -> None:
        size = self.block_tokens
        blocks = path[decision.offset // size : (decision.offset + decision.tokens) // size]
        if self.one_in > 1:
            blocks = self._sampled(blocks)
        if blocks:
            last = self._admitted_last
            fact = Left(decision, cause, tier, last, self._evicted_tokens, page)
            self._blocks.put(blocks, fact)

    # ---- admission, writes and end of requests ----

    def classify_misses(
        self, request: LiveRequest, cached: int, late_host: int = 0,
        tokens: Sequence[int] = (), namespace: Hashable = None,
    ) -> None:  # fmt: skip
        """Record that ``request`` found ``cached`` of its prompt tokens and computes the rest.

        ``late_host``: the following tokens that the host holds but does not load. ``tokens``: the
        prompt, to recognise it in other namespaces; ``namespace``: its own. The check of namespaces
        costs nothing on a server with one namespace, and is skipped while blocks are sampled.
        """
        if self._pending:
            self._settle()
        self._limit(request)
        prompt = request.prompt_tokens
        found = request.misses = Misses(cached)
        at = cached
        if late_host > 0 and at < prompt:
            late_host = min(late_host, prompt - at)
            found.add((LATE, tier_name(HOST)), late_host)
            at += late_host
        if at < prompt:
            self._classify(request, found, at)
        if len(self._namespaces) < 2:
            self._namespaces.add(namespace)
        if len(self._namespaces) > 1 and self.one_in == 1 and _NEW in found.sums:
            self._elsewhere(request, found, tokens)
        self._admitted_last = request.label or request.category

    def _classify(self, request: LiveRequest, found: Misses, at: int) -> None:
        """Add the causes of the prompt tokens from ``at`` on."""
        size, path, prompt = self.block_tokens, request.path, request.prompt_tokens
        full = min(len(path), prompt // size)
        first = min(at // size, full)
        blocks = path[first:full]
        key: Any = None
        if self.one_in > 1:
            key = self._classify_sample(found, blocks, first, at, prompt)
            at = max(at, full * size)
        else:
            (newer, older), known, begin = self._blocks.readers(), None, at
            for end, block in enumerate(blocks, first + 1):
                fact = newer(block) or older(block)
                if fact is None:
                    break
                if fact is not known or (type(fact) is Visit and key != _IN_FLIGHT):
                    if at > begin:
                        found.charge(key, known, at - begin)
                    key, known, begin = self._cause(fact, end * size, prompt), fact, at
                at = end * size
            if at > begin:
                found.charge(key, known, at - begin)
            if at < full * size:
                # The first request with a block is also the first with all following blocks.
                key = _NEW
        if at < prompt:
            # Tokens after the last whole block are as new as that block, or belong to no whole
            # page.
            as_before = key in (_NEW, _IN_FLIGHT)
            found.add(key if as_before else _PARTIAL, prompt - at)
        self._last = key or self._last
        if self.one_in > 1:
            blocks = self._sampled(blocks)
        if blocks:
            self._blocks.put(blocks, found.visit)

    def _classify_sample(
        self, found: Misses, blocks: Sequence[int], first: int, at: int, prompt: int
    ) -> Key | None:
        """Add the causes of ``blocks``, of which one in ``one_in`` is known: the others share the next
        one's, or the last one's. Returns the last cause."""
        size, rest, key = self.block_tokens, self.one_in - 1, None
        (newer, older), known, begin = self._blocks.readers(), None, at
        for end, block in enumerate(blocks, first + 1):
            if block & rest:
                continue
            fact = newer(block) or older(block)
            if fact is not known or (type(fact) is Visit and key != _IN_FLIGHT):
                if at > begin:
                    found.charge(key or _NEW, known, at - begin)
                key, known, begin = self._cause(fact, end * size, prompt), fact, at
                if fact is None:  # and so are the blocks behind it
                    break
            at = end * size
        if at > begin:
            found.charge(key or _NEW, known, at - begin)
        pending = (first + len(blocks)) * size - at
        if pending > 0:
            found.add(key or self._last, pending)
        return key

    def _cause(self, fact: Visit | Left | None, end: int, prompt: int) -> Key:
        """Return the cause of a missed block that ends after ``end`` tokens."""
        if fact is None:
            return _NEW
        if type(fact) is Left:
            if fact.cause == LATE and not self._disk.holds(fact.page or ""):
                return EVICTED, tier_name(DISK)
            if fact.cause == FLUSHED:
                return FLUSHED, NO_TIER
            return fact.cause, tier_name(fact.tier)
        assert type(fact) is Visit
        if end > fact.written:
            if fact.running:
                return _IN_FLIGHT
            if end - fact.written >= self.page_tokens + self.block_tokens:
                return NOT_WRITTEN, tier_name(DEVICE)
            return _PARTIAL
        # The last token is always computed, together with its page.
        if end > (prompt - 1) // self.page_tokens * self.page_tokens:
            return _PARTIAL
        return UNKNOWN, NO_TIER

    def _elsewhere(self, request: LiveRequest, found: Misses, tokens: Sequence[int]) -> None:
        """Charge new tokens that are cached in another namespace to ``OTHER_NAMESPACE``."""
        key = _NEW
        size, chain, seen = self.block_tokens, 0, 0
        raw = memoryview(array("q", tokens)).cast("B")
        blocks = []
        for at in range(0, len(tokens) // size * size, size):
            chain = xxhash.xxh3_64_intdigest(raw[8 * at : 8 * (at + size)], seed=chain)
            blocks.append(chain)
            if len(blocks) == seen + 1 and self._plain.get(chain) is not None:
                seen += 1
        self._plain.put(blocks[seen:], found.visit)
        new = found.sums[key]
        moved = min(new, max(0, seen * size - (request.prompt_tokens - new)))
        if moved:
            found.sums[key] -= moved
            found.add((OTHER_NAMESPACE, NO_TIER), moved)

    def written(self, request: LiveRequest, tokens: int) -> None:
        """Record that the first ``tokens`` of the path of ``request`` are in the tree."""
        misses = request.misses
        if misses is not None and tokens > misses.visit.written:
            misses.visit.written = tokens

    def count_misses(self, request: LiveRequest, hits: int) -> None:
        """Record the end of ``request``; ``hits``: its prompt tokens found in any tier."""
        misses, request.misses = request.misses, None
        if misses is None:
            misses = Misses(hits)
        misses.visit.running = False
        sums, missed = misses.sums, max(0, request.prompt_tokens - hits)
        wrong = missed - sum(sums.values())
        if wrong:
            self.corrected_tokens += abs(wrong)
            sums = fitted(sums, missed)
        self.missed.add(sums, request.tenant)
        for left, tokens in misses.evicted:
            self.missed.add_evicted(left, tokens, request.time, self._evicted_tokens, self._capacity)  # fmt: skip

    def stats(self) -> dict[str, Any]:
        """Return all sums as plain data, for administrators."""
        return {
            **self.missed.stats(),
            "one_block_in": self.one_in,
            "corrected_tokens": self.corrected_tokens,
            "remembered_blocks": len(self._blocks),
        }

    # ---- bounds ----

    @property
    def _recorded(self) -> int:
        """Return ``n`` if one block in ``n`` is recorded."""
        return self.one_in if self._finer_since is None else self.one_in // 2

    def _sampled(self, blocks: Sequence[int]) -> list[int]:
        """Return those of ``blocks`` that are recorded."""
        rest = self._recorded - 1  # a power of two less one; ids are hashes
        return [block for block in blocks if not block & rest]

    def _limit(self, request: LiveRequest) -> None:
        """Adapt the map's size to the cache, and the sample to the map's size and the load."""
        begin, tokens = self._window
        if request.time - begin < _WINDOW_S:
            self._window = begin, tokens + request.prompt_tokens
            return
        self._window = request.time, request.prompt_tokens
        blocks = TIMES_THE_CACHE * self._capacity // self.block_tokens
        most = MAX_TOKENS_PER_S * self._recorded * (request.time - begin)
        load = tokens / most if begin > 0 else 0.0
        since = self._finer_since
        if load > 1.0 or blocks > MAX_BLOCKS * self._recorded:
            if since is None:
                self.one_in = min(2 * self.one_in, MAX_ONE_IN)
            self._finer_since = None
        elif since is not None:
            if self._blocks.turns >= since[0] + 2 or request.time >= since[1] + RECORDED_S:
                self.one_in, self._finer_since = self.one_in // 2, None
        elif self.one_in > 1 and load < CALM and 2 * blocks <= MAX_BLOCKS * self.one_in:
            self._finer_since = self._blocks.turns, request.time
        self._blocks.most = min(max(blocks // self._recorded, MIN_BLOCKS), MAX_BLOCKS)
        self._plain.most = self._blocks.most
