"""A lazy heap of leaves: push, discard and least in O(log n), without search."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from typing import Any

from sglang_canopy.records import Leaf

_MAX_DEAD_ENTRIES = 64
"""Dead entries allowed, beyond one per live entry, before a rebuild."""
_RANK, _LEAF = 0, -1
"""Indexes into an entry."""


class LazyHeap:
    """Leaves by rank, least first. The order is (rank, older last access, deeper offset, earlier
    creation), all as of the push. A discarded entry is emptied, and skipped once it reaches the
    top. ``Leaf.rank_state`` belongs to the policy and is not used, since it outlives the leaf's
    entry."""

    __slots__ = ("_entries", "_entry_by_leaf", "_push_count")

    def __init__(self) -> None:
        self._entries: list[list[Any]] = []
        self._entry_by_leaf: dict[Leaf, list[Any]] = {}
        self._push_count = 0

    def __len__(self) -> int:
        return len(self._entry_by_leaf)

    def __contains__(self, leaf: Leaf) -> bool:
        return leaf in self._entry_by_leaf

    def __iter__(self) -> Iterator[Leaf]:
        return iter(self._entry_by_leaf)

    def push(self, leaf: Leaf, rank: Any) -> None:
        """Add ``leaf``, which must not be in the heap; all ranks of a heap must be comparable."""
        assert leaf not in self._entry_by_leaf, "a leaf was admitted twice"
        self._push_count += 1
        # The push counter only keeps the entries of one leaf comparable.
        entry = [rank, leaf.last_access, -leaf.offset, leaf.number, self._push_count, leaf]
        self._entry_by_leaf[leaf] = entry
        heapq.heappush(self._entries, entry)

    def discard(self, leaf: Leaf) -> bool:
        """Remove ``leaf``; return whether it was in the heap."""
        entry = self._entry_by_leaf.pop(leaf, None)
        if entry is None:
            return False
        entry[_LEAF] = None
        if len(self._entries) > 2 * len(self._entry_by_leaf) + _MAX_DEAD_ENTRIES:
            self._entries = [entry for entry in self._entries if entry[_LEAF] is not None]
            heapq.heapify(self._entries)
        return True

    def least(self) -> Leaf | None:
        """Return the leaf of least rank; ``None`` if empty."""
        entries = self._entries
        while entries:
            leaf = entries[0][_LEAF]
            if leaf is not None:
                return leaf
            heapq.heappop(entries)
        return None

    def rank(self, leaf: Leaf) -> Any:
        """Return the rank of ``leaf`` at its push."""
        return self._entry_by_leaf[leaf][_RANK]
