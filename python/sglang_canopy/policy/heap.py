"""A lazy heap of leaves: push, discard and pop-least in O(log n), no search."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from typing import Any

from sglang_canopy.policy.base import Leaf


class LazyHeap:
    """Leaves by rank, least first. A leaf's ``slot`` holds its entry while it is in here.

    Order is (rank, older last access, deeper offset, earlier push), all as they were at the
    push. Entries are never searched for: a discarded one is emptied and skipped later, and
    the heap is rebuilt when such entries outnumber the live ones.
    """

    __slots__ = ("_dead", "_entries", "_pushes")

    def __init__(self) -> None:
        self._entries: list[list[Any]] = []
        self._pushes = 0
        self._dead = 0

    def __len__(self) -> int:
        return len(self._entries) - self._dead

    def push(self, leaf: Leaf, rank: Any) -> None:
        assert leaf.slot is None, "a leaf was admitted twice"
        self._pushes += 1
        leaf.slot = entry = [rank, leaf.last_access, -leaf.offset, self._pushes, leaf]
        heapq.heappush(self._entries, entry)

    def discard(self, leaf: Leaf) -> bool:
        """Take ``leaf`` out; returns whether it was in."""
        entry = leaf.slot
        if entry is None:
            return False
        leaf.slot = entry[4] = None
        self._dead += 1
        if self._dead > 64 and self._dead * 2 > len(self._entries):
            self._entries = [e for e in self._entries if e[4] is not None]
            heapq.heapify(self._entries)
            self._dead = 0
        return True

    def peek(self) -> Leaf | None:
        """The least leaf, left in place."""
        entries = self._entries
        while entries:
            leaf = entries[0][4]
            if leaf is not None:
                return leaf
            heapq.heappop(entries)
            self._dead -= 1
        return None

    def rank(self, leaf: Leaf) -> Any:
        """The rank ``leaf`` was pushed with."""
        return leaf.slot[0]

    def __iter__(self) -> Iterator[Leaf]:
        return (e[4] for e in self._entries if e[4] is not None)
