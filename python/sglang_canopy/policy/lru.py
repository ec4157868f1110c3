"""``lru``: least recently used, SGLang's default and the baseline of every figure.

On a tree whose requests stamp their whole path this is LRU over blocks, the blocks of one
request ordered deepest first, so ``sim/stack.py`` gives every capacity in one pass.
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


class LRU(Policy):
    """Evicts the leaf whose last access is oldest. O(log n)."""

    name: ClassVar[str] = "lru"
    Config: ClassVar[type] = Config

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self._heap = LazyHeap()

    def admit(self, leaf: Leaf, now: float) -> None:
        self._heap.push(leaf, leaf.last_access)

    def drop(self, leaf: Leaf) -> None:
        self._heap.discard(leaf)

    # victim = the leaf with the least last_access
    def victim(self, now: float) -> Victim | None:
        leaf = self._heap.least()
        return None if leaf is None else Victim(leaf)

    def leaves(self) -> Iterator[Leaf]:
        return iter(self._heap)


POLICY = LRU
