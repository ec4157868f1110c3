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
from typing import Any, Final, NamedTuple

from sglang_canopy.records import Leaf
from sglang_canopy.reuse.category import Category
from sglang_canopy.reuse.survival import AGE_BINS, AGE_EDGES_S, age_bin

_MAX_DEAD_ENTRIES = 32
"""Dead entries allowed, beyond one per live entry, before a compaction."""

HeapEntry = list[Any]
"""``[time_s, -offset, number, sequence, leaf]``; ``leaf`` is ``None`` once removed."""
TIME_S, LEAF = 0, -1
"""Indexes into a ``HeapEntry``."""
_ENTRY: Final = -1
"""Index of the entry in a tuple of ``EndQueue._high``."""


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

    __slots__ = ("_high", "_low", "_sequence", "size")

    def __init__(self) -> None:
        self._low: list[HeapEntry] = []
        self._high: list[tuple[float, int, int, int, HeapEntry]] = []
        self._sequence = 0
        self.size = 0

    def __len__(self) -> int:
        return self.size

    def push(self, leaf: Leaf, time_s: float) -> HeapEntry:
        """Add ``leaf``; return its entry for ``remove``."""
        self._sequence = sequence = self._sequence + 1
        depth, number = -leaf.offset, leaf.number
        entry: HeapEntry = [time_s, depth, number, sequence, leaf]
        heapq.heappush(self._low, entry)
        heapq.heappush(self._high, (-time_s, depth, number, sequence, entry))
        self.size += 1
        return entry

    def remove(self, entry: HeapEntry) -> None:
        """Remove an entry, at most once."""
        assert entry[LEAF] is not None, "entry already removed"
        entry[LEAF] = None
        self.size -= 1
        max_entries = 2 * self.size + _MAX_DEAD_ENTRIES
        if len(self._low) > max_entries:
            self._low = [entry for entry in self._low if entry[LEAF] is not None]
            heapq.heapify(self._low)
        if len(self._high) > max_entries:
            self._high = [pair for pair in self._high if pair[_ENTRY][LEAF] is not None]
            heapq.heapify(self._high)

    def oldest(self) -> HeapEntry | None:
        """Return the entry with the least time, the deepest of equals; ``None`` if empty."""
        low = self._low
        while low and low[0][LEAF] is None:
            heapq.heappop(low)
        return low[0] if low else None

    def youngest(self) -> HeapEntry | None:
        """Return the entry with the greatest time, the deepest of equals; ``None`` if empty."""
        high = self._high
        while high and high[0][_ENTRY][LEAF] is None:
            heapq.heappop(high)
        return high[0][_ENTRY] if high else None

    def __iter__(self) -> Iterator[Leaf]:
        return (entry[LEAF] for entry in self._low if entry[LEAF] is not None)


class _Overdue(NamedTuple):
    """An entry of a ``ReturnQueue`` and the time from which it is overdue; ``push_number`` breaks ties."""

    overdue_at: float
    push_number: int
    entry: HeapEntry


class ReturnQueue(EndQueue):
    """Leaves by hinted return, each protected until its own time. ``key``: key of the hint records of
    all leaves in the queue."""

    __slots__ = ("_overdue", "key")

    def __init__(self, key: Hashable) -> None:
        super().__init__()
        self.key = key
        self._overdue: list[_Overdue] = []

    def push_until(self, leaf: Leaf, time_s: float, overdue_at: float) -> HeapEntry:
        """Add a leaf that returns at ``time_s`` and is overdue from ``overdue_at`` on."""
        entry = self.push(leaf, time_s)
        heapq.heappush(self._overdue, _Overdue(overdue_at, self._sequence, entry))
        if len(self._overdue) > 2 * self.size + _MAX_DEAD_ENTRIES:
            self._overdue = [due for due in self._overdue if due.entry[LEAF] is not None]
            heapq.heapify(self._overdue)
        return entry

    def longest_overdue(self, now: float) -> Leaf | None:
        """Return the leaf that is overdue the longest, or ``None``."""
        heap = self._overdue
        while heap and (heap[0].entry[LEAF] is None or heap[0].overdue_at <= now):
            leaf = heap[0].entry[LEAF]
            if leaf is not None:
                return leaf
            heapq.heappop(heap)
        return None


_NEVER = math.inf


class Cell(EndQueue):
    """Leaves of one category and bucket, by last access."""

    __slots__ = ("category", "key", "version", "wakes_at", "weight")

    def __init__(self, key: Hashable, category: Category, weight: float) -> None:
        super().__init__()
        self.key = key
        self.category = category
        self.weight = weight
        self.version = 0
        """Candidates with an older version are stale."""
        self.wakes_at = _NEVER
        """Time of its next ranking, if it does not change earlier."""


class Candidate(NamedTuple):
    """The least end of a cell, as of the cell's ``version``."""

    order: tuple[float, ...]
    """``(rank, time_s, -offset, number)``, or ``(rank, -offset, time_s, number)`` for a fitted
    exponential."""
    push_number: int
    entry: HeapEntry
    version: int
    cell: Cell


class Cells:
    """All cells, with the least ``(rank, last access, -offset, number)`` among their end leaves.
    The rank is ``Category.rank`` or, with ``is_exponential``, ``Category.exponential`` at the exact
    age: equal ranks are then ordered by ``(rank, -offset)``, as in the ATC 2025 paper, and every
    cell is ranked at every new time."""

    def __init__(self, is_exponential: bool = False) -> None:
        self._is_exponential = is_exponential
        self._order = self._exponential_order if is_exponential else self._survival_order
        """Returns an entry's order of eviction, and the time until which it holds."""
        self._cells: dict[Hashable, Cell] = {}
        self._changed_cells: dict[Cell, None] = {}
        """Cells to rank again, by first change."""
        self._candidates: list[Candidate] = []
        self._wake_times: list[tuple[float, int, Cell]] = []
        """Heap of times at which cells are ranked again; all entries except a cell's
        ``wakes_at`` are stale."""
        self._push_count = 0

    def push(
        self, key: Hashable, leaf: Leaf, read_category: Callable[[], tuple[Category, float]]
    ) -> None:
        """Add ``leaf`` to cell ``key``; ``read_category`` returns the category and weight of a new cell."""
        cell = self._cells.get(key)
        if cell is None:
            cell = self._cells[key] = Cell(key, *read_category())
        leaf.rank_state = (cell, cell.push(leaf, leaf.last_access))
        self._changed_cells[cell] = None

    def put_back(self, cell: Cell, leaf: Leaf) -> None:
        """Add a removed leaf to the same cell again."""
        cell = self._cells.setdefault(cell.key, cell)
        leaf.rank_state = (cell, cell.push(leaf, leaf.last_access))
        self._changed_cells[cell] = None

    def remove(self, leaf: Leaf) -> None:
        cell, entry = leaf.rank_state
        leaf.rank_state = None
        cell.remove(entry)
        self._changed_cells[cell] = None

    def reweigh(self, weigh: Callable[[Cell], float] | None = None) -> None:
        """Rank every cell again after a fit, with new weights if ``weigh`` is given."""
        for cell in self._cells.values():
            if weigh is not None:
                cell.weight = weigh(cell)
            self._changed_cells[cell] = None

    def least(self, now: float) -> Candidate | None:
        """Return the candidate of least order at ``now``; ``None`` without a leaf."""
        while self._wake_times and self._wake_times[0][0] <= now:
            wakes_at, _, cell = heapq.heappop(self._wake_times)
            if wakes_at == cell.wakes_at:
                cell.wakes_at = _NEVER
                self._changed_cells[cell] = None
        for cell in self._changed_cells:
            self._rank(cell, now)
        self._changed_cells.clear()
        heap = self._candidates
        while heap and heap[0].version != heap[0].cell.version:
            heapq.heappop(heap)
        if len(heap) > 4 * len(self._cells) + 64:
            self._candidates = heap = [one for one in heap if one.version == one.cell.version]
            heapq.heapify(heap)
        return heap[0] if heap else None

    def _rank(self, cell: Cell, now: float) -> None:
        cell.version += 1
        oldest = cell.oldest()
        if oldest is None:
            del self._cells[cell.key]
            cell.wakes_at = _NEVER
            return
        order, until = self._order(cell, oldest, now)
        entry = oldest
        # The exact rank falls with age, so the oldest leaf is the least.
        youngest = oldest if self._is_exponential or cell.size == 1 else cell.youngest()
        if youngest is not oldest and youngest is not None:
            young_order, young_until = self._order(cell, youngest, now)
            if young_until < until:
                until = young_until
            if young_order < order:
                entry, order = youngest, young_order
        self._push_count += 1
        candidate = Candidate(order, self._push_count, entry, cell.version, cell)
        heapq.heappush(self._candidates, candidate)
        if until < cell.wakes_at:  # a cell that wakes earlier is also ranked in time
            cell.wakes_at = until
            heapq.heappush(self._wake_times, (until, self._push_count, cell))
            if len(self._wake_times) > 4 * len(self._cells) + 64:
                self._wake_times = [due for due in self._wake_times if due[0] == due[2].wakes_at]
                heapq.heapify(self._wake_times)

    @staticmethod
    def _exponential_order(
        cell: Cell, entry: HeapEntry, now: float
    ) -> tuple[tuple[float, ...], float]:
        time_s, depth, number, _, _ = entry
        exponential = cell.category.exponential
        rank = cell.weight * exponential.rank(now - time_s)
        ties = (depth, time_s) if exponential.mean_gap_s > 0.0 else (time_s, depth)
        return (rank, *ties, number), math.nextafter(now, _NEVER)

    @staticmethod
    def _survival_order(
        cell: Cell, entry: HeapEntry, now: float
    ) -> tuple[tuple[float, ...], float]:
        time_s, depth, number, _, _ = entry
        bin_index = age_bin(now - time_s)
        until = time_s + AGE_EDGES_S[bin_index + 1] if bin_index + 1 < AGE_BINS else _NEVER
        return (cell.weight * cell.category.rank[bin_index], time_s, depth, number), until

    def rank(self, category: Category, time_s: float, now: float) -> float:
        """Return the unweighted rank of a leaf of ``category`` last used at ``time_s``."""
        if self._is_exponential:
            return category.exponential.rank(now - time_s)
        return category.rank[age_bin(now - time_s)]

    def __iter__(self) -> Iterator[Leaf]:
        for cell in self._cells.values():
            yield from cell
