"""Base of policies that fix a leaf's rank at its admission."""

from __future__ import annotations

import abc
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from sglang_canopy.policy.base import Policy, Victim
from sglang_canopy.policy.structures.lazy_heap import LazyHeap
from sglang_canopy.records import Leaf


@dataclass(frozen=True, slots=True)
class NoOptions:
    """``Config`` of a policy without options."""


class RankedPolicy(Policy):
    """Evicts the leaf of least rank; ties are broken by older last access, then by depth. O(log n). A
    subclass defines the rank."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self._heap = LazyHeap()

    @abc.abstractmethod
    def rank(self, leaf: Leaf) -> Any:
        """Return a comparable rank, unaffected by other leaves' accesses. The least is evicted."""

    def admit(self, leaf: Leaf, now: float) -> None:
        self._heap.push(leaf, self.rank(leaf))

    def drop(self, leaf: Leaf) -> None:
        self._heap.discard(leaf)

    def split(self, leaf: Leaf, head: Leaf) -> None:
        if self._heap.discard(leaf):
            self.admit(leaf, leaf.last_access)  # offset breaks ties

    def victim(self, now: float) -> Victim | None:
        leaf = self._heap.least()
        return None if leaf is None else Victim(leaf)

    def explain(self, leaf: Leaf, now: float) -> Mapping[str, Any]:
        return {"rank": str(self.rank(leaf)), "idle_s": round(now - leaf.last_access, 3)}

    def leaves(self) -> Iterator[Leaf]:
        return iter(self._heap)
