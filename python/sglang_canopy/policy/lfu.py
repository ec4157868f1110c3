"""``lfu``: least frequently used, ties by recency.

A leaf's frequency is the number of requests that used it since it was cached; it is forgotten
with the leaf (in-cache LFU, as in libCacheSim and SGLang).
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


class LFU(Policy):
    """Evicts the leaf with the fewest uses, the least recent of them first. O(log n)."""

    name: ClassVar[str] = "lfu"
    Config: ClassVar[type] = Config

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self._heap = LazyHeap()

    def admit(self, leaf: Leaf, now: float) -> None:
        self._heap.push(leaf, leaf.hits)

    def drop(self, leaf: Leaf) -> None:
        self._heap.discard(leaf)

    # victim = the leaf with the least (hits, last_access)
    def victim(self, now: float) -> Victim | None:
        leaf = self._heap.least()
        return None if leaf is None else Victim(leaf)

    def leaves(self) -> Iterator[Leaf]:
        return iter(self._heap)


POLICY = LFU
