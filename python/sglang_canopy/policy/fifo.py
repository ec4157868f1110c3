"""``fifo``: first in, first out, by when a node was cached; use does not matter.

Only leaves can go, so an old prefix stays while something younger hangs below it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

from sglang_canopy.policy.base import Leaf, Policy, Victim
from sglang_canopy.policy.heap import LazyHeap


@dataclass(frozen=True, slots=True)
class Config:
    """No options."""


class FIFO(Policy):
    """Evicts the leaf that was cached first. O(log n)."""

    name: ClassVar[str] = "fifo"
    Config: ClassVar[type] = Config

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self._heap = LazyHeap()

    def admit(self, leaf: Leaf, now: float) -> None:
        self._heap.push(leaf, leaf.created)

    def drop(self, leaf: Leaf) -> None:
        self._heap.discard(leaf)

    # victim = the leaf with the least created
    def victim(self, now: float) -> Victim | None:
        leaf = self._heap.least()
        return None if leaf is None else Victim(leaf)

    def leaves(self) -> Iterator[Leaf]:
        return iter(self._heap)


POLICY = FIFO
