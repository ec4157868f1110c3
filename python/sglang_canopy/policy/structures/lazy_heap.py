"""A lazy heap of leaves: push, discard and least in O(log n), no search."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from typing import Any

from sglang_canopy.records import Leaf

_SLACK = 64
"""Dead entries tolerated on top of one per live entry before the heap is rebuilt."""


class LazyHeap:
    """Leaves by rank, least first.

    Order is (rank, older last access, deeper offset, earlier creation), all as they were at the
    push. A discarded entry is emptied and skipped when it surfaces. ``Leaf.slot`` is not
    used: it is the policy's own, and outlives a leaf's stay in here.
    """

    __slots__ = ("_entries", "_live", "_pushes")

    def __init__(self) -> None:
        self._entries: list[list[Any]] = []
        self._live: dict[Leaf, list[Any]] = {}
        self._pushes = 0

    def __len__(self) -> int:
        return len(self._live)

    def __contains__(self, leaf: Leaf) -> bool:
        return leaf in self._live

    def __iter__(self) -> Iterator[Leaf]:
        return iter(self._live)

    def push(self, leaf: Leaf, rank: Any) -> None:
        """Add ``leaf``, which must not be in; ranks of one heap must be comparable."""
        assert leaf not in self._live, "a leaf was admitted twice"
        self._pushes += 1
        # The count of pushes only keeps the entries of one leaf comparable.
        entry = [rank, leaf.last_access, -leaf.offset, leaf.number, self._pushes, leaf]
        self._live[leaf] = entry
        heapq.heappush(self._entries, entry)

    def discard(self, leaf: Leaf) -> bool:
        """Take ``leaf`` out; returns whether it was in."""
        entry = self._live.pop(leaf, None)
        if entry is None:
            return False
        entry[5] = None
        if len(self._entries) > 2 * len(self._live) + _SLACK:
            self._entries = [e for e in self._entries if e[5] is not None]
            heapq.heapify(self._entries)
        return True

    def least(self) -> Leaf | None:
        """The least leaf, left in place."""
        entries = self._entries
        while entries:
            leaf = entries[0][5]
            if leaf is not None:
                return leaf
            heapq.heappop(entries)
        return None

    def rank(self, leaf: Leaf) -> Any:
        """The rank ``leaf`` was pushed with."""
        return self._live[leaf][0]
