"""Least recently used: SGLang's default, and the baseline of every figure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from sglang_canopy.policy.base import Leaf, Policy, Victim
from sglang_canopy.policy.heap import LazyHeap


@dataclass(frozen=True, slots=True)
class LRUConfig:
    """No options."""


class LRU(Policy):
    """Evicts the leaf whose last access is oldest.

    On a tree whose requests stamp their whole path this is LRU over blocks with ties of one
    request broken deepest first, so ``sim/stack.py`` gives every capacity in one pass.
    """

    name = "lru"
    Config = LRUConfig

    def __init__(self, config: LRUConfig | None = None) -> None:
        self.config = config or LRUConfig()
        self._heap = LazyHeap()

    def admit(self, leaf: Leaf, now: float) -> None:
        self._heap.push(leaf, leaf.last_access)

    def drop(self, leaf: Leaf) -> None:
        self._heap.discard(leaf)

    # victim: least last_access
    def victim(self, now: float) -> Victim | None:
        leaf = self._heap.peek()
        return None if leaf is None else Victim(leaf)

    def leaves(self) -> Iterator[Leaf]:
        return iter(self._heap)


POLICY = LRU
