"""A lazy heap of leaves: push, discard and least in O(log n), without search."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from typing import Any

from sglang_canopy.records import Leaf

_DEAD_SLACK = 64
"""Dead entries allowed, beyond one per live entry, before a rebuild."""
_RANK, _LEAF = 0, -1
"""Indexes into an entry."""


class LazyHeap:
    """Leaves by rank, least first.

    The order is (rank, older last access, deeper offset, earlier creation), all as of the push. A
    discarded entry is emptied, and skipped once it reaches the top. ``Leaf.rank_state`` belongs to the
    policy and is not used, since it outlives the leaf's entry.
    """

    __slots__ = ("_entries", "_entry_of", "_pushes")

    def __init__(self) -> None:
        self._entries: list[list[Any]] = []
        self._entry_of: dict[Leaf, list[Any]] = {}
        self._pushes = 0

    def __len__(self) -> int:
        return len(self._entry_of)

    def __contains__(self, leaf: Leaf) -> bool:
        return leaf in self._entry_of

    def __iter__(self) -> Iterator[Leaf]:
        return iter(self._entry_of)

    def push(self, leaf: Leaf, rank: Any) -> None:
        """Add ``leaf``, which must not be in the heap; all ranks of a heap must be comparable."""
        assert leaf not in self._entry_of, "a leaf was admitted twice"
        self._pushes += 1
        # The push counter only keeps the entries of one leaf comparable.
        entry = [rank, leaf.last_access, -leaf.offset, leaf.number, self._pushes, leaf]
        self._entry_of[leaf] = entry
        heapq.heappush(self._entries, entry)

    def discard(self, leaf: Leaf) -> bool:
        """Remove ``leaf``; return whether it was in the heap."""
        entry = self._entry_of.pop(leaf, None)
        if entry is None:
            return False
        entry[_LEAF] = None
        if len(self._entries) > 2 * len(self._entry_of) + _DEAD_SLACK:
            self._entries = [e for e in self._entries if e[_LEAF] is not None]
            heapq.heapify(self._entries)
        return True

    def least(self) -> Leaf | None:
        entries = self._entries
        while entries:
            leaf = entries[0][_LEAF]
            if leaf is not None:
                return leaf
            heapq.heappop(entries)
        return None

    def rank(self, leaf: Leaf) -> Any:
        """Return the rank of ``leaf`` at its push."""
        return self._entry_of[leaf][_RANK]
