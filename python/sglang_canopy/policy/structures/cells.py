"""Queues of leaves ranked by category and age, and the least leaf of all queues.

A *cell* holds the leaves of one category (and of one depth bucket, if ranks depend on depth). Ranks
are constant within an age bin, so a cell's candidate is valid until one of its two ends moves to
the next bin: only changed cells and cells whose end crossed an edge are ranked again, for any
number of categories. Leaves on disk all have number 0: of equal ones, the cell ranked first wins.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Hashable, Iterator
from typing import Any

from sglang_canopy.records import Leaf
from sglang_canopy.reuse.category import Category
from sglang_canopy.reuse.survival import BINS, EDGES, age_bin

_SLACK = 32
"""Dead entries allowed, beyond one per live entry, before a compaction."""

HeapEntry = list[Any]
"""``[time_s, -offset, number, sequence, leaf]``; ``leaf`` is ``None`` once removed."""


class EndQueue:
    """Leaves ordered by ``(time_s, -offset, number)``: older, then deeper, then created first.

    Both ends matter: after a tool call the chance of reuse first rises with age and then falls, so
    the least valuable leaf of a category is its oldest or its youngest, rarely one between. Leaves are
    not added in the order of last access: a parent becomes a leaf with an old time when its last
    child is evicted. Hence two heaps with lazy deletion: ``push`` is O(log n), ``remove`` O(1), and
    reading an end O(1), plus O(log n) amortised per dead entry.

    ``time_s`` is in seconds: the last access, the hinted return, or the end of a keep. The order
    of ``push`` decides only between leaves that are equal otherwise, and on disk have no number.
    """

    __slots__ = ("_high", "_low", "_sequence", "live")

    def __init__(self) -> None:
        self._low: list[HeapEntry] = []
        self._high: list[tuple[float, int, int, int, HeapEntry]] = []
        self._sequence = 0
        self.live = 0
        """Leaves in the queue."""

    def __len__(self) -> int:
        return self.live

    def push(self, leaf: Leaf, time_s: float) -> HeapEntry:
        """Add ``leaf``; return its entry for ``remove``."""
        self._sequence = sequence = self._sequence + 1
        depth, number = -leaf.offset, leaf.number
        entry: HeapEntry = [time_s, depth, number, sequence, leaf]
        heapq.heappush(self._low, entry)
        heapq.heappush(self._high, (-time_s, depth, number, sequence, entry))
        self.live += 1
        return entry

    def remove(self, entry: HeapEntry) -> None:
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

    def oldest(self) -> HeapEntry | None:
        """Return the entry with the least time, the deepest of equals; ``None`` if empty."""
        low = self._low
        while low and low[0][-1] is None:
            heapq.heappop(low)
        return low[0] if low else None

    def youngest(self) -> HeapEntry | None:
        """Return the entry with the greatest time, the deepest of equals; ``None`` if empty."""
        high = self._high
        while high and high[0][-1][-1] is None:
            heapq.heappop(high)
        return high[0][-1] if high else None

    def __iter__(self) -> Iterator[Leaf]:
        return (e[-1] for e in self._low if e[-1] is not None)


class ReturnQueue(EndQueue):
    """Leaves by hinted return, each protected until its own time.

    ``key``: key of the hint records of all leaves in the queue.
    """

    __slots__ = ("_ends", "key")

    def __init__(self, key: Hashable) -> None:
        super().__init__()
        self.key = key
        self._ends: list[tuple[float, int, HeapEntry]] = []

    def push_until(self, leaf: Leaf, time_s: float, until: float) -> HeapEntry:
        """Add a leaf that returns at ``time_s`` and is overdue from ``until`` on."""
        entry = self.push(leaf, time_s)
        heapq.heappush(self._ends, (until, self._sequence, entry))
        if len(self._ends) > 2 * self.live + _SLACK:
            self._ends = [e for e in self._ends if e[2][-1] is not None]
            heapq.heapify(self._ends)
        return entry

    def overdue(self, now: float) -> Leaf | None:
        """Return the leaf that is overdue the longest, or ``None``."""
        ends = self._ends
        while ends and (ends[0][2][-1] is None or ends[0][0] <= now):
            leaf = ends[0][2][-1]
            if leaf is not None:
                return leaf
            heapq.heappop(ends)
        return None


_NEVER = math.inf


class Cell(EndQueue):
    """Leaves of one category and bucket, by last access."""

    __slots__ = ("category", "key", "version", "wakes", "weight")

    def __init__(self, key: Hashable, category: Category, weight: float) -> None:
        super().__init__()
        self.key = key
        self.category = category
        self.weight = weight
        self.version = 0
        """Candidates with an older version are stale."""
        self.wakes = _NEVER
        """Time of its next ranking, if it does not change earlier."""


class Cells:
    """All cells, with the least ``(rank, last access, -offset, number)`` among their end leaves.

    The rank is ``Category.rank`` or, with ``exponential``, ``Category.exponential`` at the exact age:
    equal ranks are then ordered by ``(rank, -offset)``, as in the ATC 2025 paper, and every cell is
    ranked at every new time.
    """

    def __init__(self, exponential: bool = False) -> None:
        self._exponential = exponential
        self._order = self._exponential_order if exponential else self._survival_order
        """Function: an entry's order of eviction, and the time until which it holds."""
        self._cells: dict[Hashable, Cell] = {}
        self._changed: dict[Cell, None] = {}
        """Cells to rank again, by first change."""
        self._heap: list[tuple[Any, ...]] = []
        self._edges: list[tuple[float, int, Cell]] = []
        """Times at which cells are ranked again; all entries except a cell's ``wakes``
        are stale."""
        self._count = 0

    def push(self, key: Hashable, leaf: Leaf, make: Callable[[], tuple[Category, float]]) -> None:
        """Add ``leaf`` to cell ``key``; ``make`` returns the category and weight of a new cell."""
        cell = self._cells.get(key)
        if cell is None:
            cell = self._cells[key] = Cell(key, *make())
        leaf.rank_state = (cell, cell.push(leaf, leaf.last_access))
        self._changed[cell] = None

    def put_back(self, cell: Cell, leaf: Leaf) -> None:
        """Add a removed leaf to the same cell again."""
        cell = self._cells.setdefault(cell.key, cell)
        leaf.rank_state = (cell, cell.push(leaf, leaf.last_access))
        self._changed[cell] = None

    def remove(self, leaf: Leaf) -> None:
        """Remove an admitted leaf."""
        cell, entry = leaf.rank_state
        leaf.rank_state = None
        cell.remove(entry)
        self._changed[cell] = None

    def reweigh(self, weight: Callable[[Cell], float] | None = None) -> None:
        """Rank every cell again after a fit, with new weights if ``weight`` is given."""
        for cell in self._cells.values():
            if weight is not None:
                cell.weight = weight(cell)
            self._changed[cell] = None

    def least(self, now: float) -> tuple[tuple[float, ...], Leaf] | None:
        """Return the least leaf of all cell ends at ``now``, with its order: ``(rank, time_s, -offset,
        number)``, or ``(rank, -offset, time_s, number)`` for a fitted exponential."""
        while self._edges and self._edges[0][0] <= now:
            time, _, cell = heapq.heappop(self._edges)
            if time == cell.wakes:
                cell.wakes = _NEVER
                self._changed[cell] = None
        for cell in self._changed:
            self._rank(cell, now)
        self._changed.clear()
        heap = self._heap
        while heap and heap[0][-2] != heap[0][-1].version:
            heapq.heappop(heap)
        if len(heap) > 4 * len(self._cells) + 64:
            self._heap = heap = [c for c in heap if c[-2] == c[-1].version]
            heapq.heapify(heap)
        if not heap:
            return None
        return heap[0][0], heap[0][2][-1]

    def _rank(self, cell: Cell, now: float) -> None:
        cell.version += 1
        old = cell.oldest()
        if old is None:
            del self._cells[cell.key]
            cell.wakes = _NEVER
            return
        order, until = self._order(cell, old, now)
        entry = old
        # The exact rank falls with age, so the oldest leaf is the least.
        young = old if self._exponential or cell.live == 1 else cell.youngest()
        if young is not old and young is not None:
            young_order, young_until = self._order(cell, young, now)
            if young_until < until:
                until = young_until
            if young_order < order:
                entry, order = young, young_order
        self._count += 1
        heapq.heappush(self._heap, (order, self._count, entry, cell.version, cell))
        if until < cell.wakes:  # a cell that wakes earlier is also ranked in time
            cell.wakes = until
            heapq.heappush(self._edges, (until, self._count, cell))
            if len(self._edges) > 4 * len(self._cells) + 64:
                self._edges = [e for e in self._edges if e[0] == e[2].wakes]
                heapq.heapify(self._edges)

    @staticmethod
    def _exponential_order(
        cell: Cell, entry: HeapEntry, now: float
    ) -> tuple[tuple[float, ...], float]:
        time_s, depth = entry[0], entry[1]
        fitted = cell.category.exponential
        rank = cell.weight * fitted.rank(now - time_s)
        ties = (depth, time_s) if fitted.mean_gap_s > 0.0 else (time_s, depth)
        return (rank, *ties, entry[2]), math.nextafter(now, _NEVER)

    @staticmethod
    def _survival_order(
        cell: Cell, entry: HeapEntry, now: float
    ) -> tuple[tuple[float, ...], float]:
        time_s, depth = entry[0], entry[1]
        age = age_bin(now - time_s)
        until = time_s + EDGES[age + 1] if age + 1 < BINS else _NEVER
        return (cell.weight * cell.category.rank[age], time_s, depth, entry[2]), until

    def rank(self, category: Category, time_s: float, now: float) -> float:
        """Return the unweighted rank of a leaf of ``category`` last used at ``time_s``."""
        if self._exponential:
            return category.exponential.rank(now - time_s)
        return category.rank[age_bin(now - time_s)]

    def __iter__(self) -> Iterator[Leaf]:
        for cell in self._cells.values():
            yield from cell
