"""A queue of evictable leaves that can be read at both ends.

SGLang's stock eviction builds a heap over every evictable leaf on every call. Canopy keeps one
queue per workload category, so that a victim is found by comparing queue ends. Both ends matter:
after a tool call the chance of reuse first rises with age and then falls, so the least valuable
leaf of a category is its oldest or its youngest, rarely one between.

Admission order differs from the order of last access: a parent becomes a leaf with an old stamp
when its last child is evicted, and a long request finishes after a short request that arrived
later. Hence two heaps with lazy deletion instead of a linked list: ``push`` is O(log n), ``remove``
O(1), and reading an end O(1), plus O(log n) amortised per dead entry.
"""

from __future__ import annotations

import heapq
from collections.abc import Hashable, Iterator
from typing import Any

from sglang_canopy.records import Leaf

_SLACK = 32
"""Dead entries allowed, beyond one per live entry, before a compaction."""

Entry = list[Any]
"""``[stamp, -offset, number, sequence, leaf]``; ``leaf`` is ``None`` once removed."""


class EndQueue:
    """Leaves ordered by ``(stamp, -offset, number)``: older, then deeper, then created first.

    The stamp is a time in seconds: the last access, or the hinted return. The order of ``push``
    does not matter; the sequence number only keeps the entries of one leaf comparable.
    """

    __slots__ = ("_high", "_low", "_sequence", "live")

    def __init__(self) -> None:
        self._low: list[Entry] = []
        self._high: list[tuple[float, int, int, int, Entry]] = []
        self._sequence = 0
        self.live = 0
        """Leaves in the queue."""

    def __len__(self) -> int:
        return self.live

    def push(self, leaf: Leaf, stamp: float) -> Entry:
        """Add ``leaf``; return its entry for ``remove``."""
        self._sequence = sequence = self._sequence + 1
        depth, number = -leaf.offset, leaf.number
        entry: Entry = [stamp, depth, number, sequence, leaf]
        heapq.heappush(self._low, entry)
        heapq.heappush(self._high, (-stamp, depth, number, sequence, entry))
        self.live += 1
        return entry

    def remove(self, entry: Entry) -> None:
        """Remove an entry, at most once."""
        assert entry[-1] is not None, "entry already removed"
        entry[-1] = None
        self.live -= 1
        limit = 2 * self.live + _SLACK
        if len(self._low) > limit:
            self._low = [e for e in self._low if e[-1] is not None]
            heapq.heapify(self._low)
        if len(self._high) > limit:
            self._high = [e for e in self._high if e[-1][-1] is not None]
            heapq.heapify(self._high)

    def oldest(self) -> Entry | None:
        """Return the entry with the least stamp, the deepest of equals; ``None`` if empty."""
        low = self._low
        while low and low[0][-1] is None:
            heapq.heappop(low)
        return low[0] if low else None

    def youngest(self) -> Entry | None:
        """Return the entry with the greatest stamp, the deepest of equals; ``None`` if empty."""
        high = self._high
        while high and high[0][-1][-1] is None:
            heapq.heappop(high)
        return high[0][-1] if high else None

    def release(self, count: int) -> bool:
        """Release ``count`` entries of a queue that is no longer used. Returns whether all are
        released."""
        del self._low[-count:], self._high[-count:]
        return not (self._low or self._high)

    def __iter__(self) -> Iterator[Leaf]:
        return (e[-1] for e in self._low if e[-1] is not None)


class ReturnQueue(EndQueue):
    """Leaves by hinted return, each protected until its own time.

    ``key``: the key of the hint records, shared by all leaves of the queue.
    """

    __slots__ = ("_ends", "key")

    def __init__(self, key: Hashable) -> None:
        super().__init__()
        self.key = key
        self._ends: list[tuple[float, int, Entry]] = []

    def push_until(self, leaf: Leaf, stamp: float, until: float) -> Entry:
        """Add a leaf that returns at ``stamp`` and is overdue from ``until`` on."""
        entry = self.push(leaf, stamp)
        heapq.heappush(self._ends, (until, self._sequence, entry))
        if len(self._ends) > 2 * self.live + _SLACK:
            self._ends = [e for e in self._ends if e[2][-1] is not None]
            heapq.heapify(self._ends)
        return entry

    def release(self, count: int) -> bool:
        del self._ends[-count:]
        return super().release(count) and not self._ends

    def overdue(self, now: float) -> Leaf | None:
        """Return the leaf that is overdue the longest, or ``None``."""
        ends = self._ends
        while ends and (ends[0][2][-1] is None or ends[0][0] <= now):
            leaf = ends[0][2][-1]
            if leaf is not None:
                return leaf
            heapq.heappop(ends)
        return None
