"""One policy with two orders: a policy's own, and LRU for as long as the policy is behind it.

Both orders hold every leaf, so that either ranks at once. The policy learns and labels all the time;
its learnt state never moves. ``whatif/floor.py`` decides which order ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from sglang_canopy.policy.base import Policy, Victim
from sglang_canopy.policy.structures.lazy_heap import LazyHeap
from sglang_canopy.records import LateHint, Leaf, Request


class FlooredPolicy(Policy):
    """``main_policy``, or LRU after ``rank_by(lru=True)``. O(log n). ``Leaf.rank_state`` belongs to
    ``main_policy``; the LRU order finds its entries by leaf."""

    def __init__(self, main_policy: Policy) -> None:
        super().__init__(main_policy.config)
        self.main_policy = main_policy
        self.name = main_policy.name  # type: ignore[misc]
        self.learns = main_policy.learns
        self.is_lru_ranking = False
        self._lru_heap = LazyHeap()

    def rank_by(self, lru: bool) -> None:
        """Choose the order of the next victims. Call it at the same request on every rank."""
        self.is_lru_ranking = lru

    def admit(self, leaf: Leaf, now: float) -> None:
        self._lru_heap.push(leaf, leaf.last_access)
        self.main_policy.admit(leaf, now)

    def drop(self, leaf: Leaf) -> None:
        self._lru_heap.discard(leaf)
        self.main_policy.drop(leaf)

    def put_back(self, leaf: Leaf, rank_state: Any, now: float) -> None:
        self._lru_heap.push(leaf, leaf.last_access)
        self.main_policy.put_back(leaf, rank_state, now)

    def split(self, leaf: Leaf, head: Leaf) -> None:
        if self._lru_heap.discard(leaf):
            self._lru_heap.push(leaf, leaf.last_access)  # offset breaks ties
        self.main_policy.split(leaf, head)

    # victim = the least recently used leaf while the policy is behind, else the policy's
    def victim(self, now: float) -> Victim | None:
        if not self.is_lru_ranking:
            return self.main_policy.victim(now)
        leaf = self._lru_heap.least()
        return None if leaf is None else Victim(leaf)

    def record_eviction(self, leaf: Leaf, tokens: int) -> None:
        if not self.is_lru_ranking:
            self.main_policy.record_eviction(leaf, tokens)

    def twin(self) -> Policy:
        return FlooredPolicy(self.main_policy.twin())

    def leaves(self) -> Iterator[Leaf]:
        return iter(self._lru_heap)

    def explain(self, leaf: Leaf, now: float) -> Mapping[str, Any]:
        explained = self.main_policy.explain(leaf, now)
        return {**explained, "ranked_by": "lru"} if self.is_lru_ranking else explained

    # ---- the policy learns, whichever order ranks; a server calls ``main_policy`` directly ----

    def arrive(self, request: Request) -> str:
        return self.main_policy.arrive(request)

    def finish(self, request: Request) -> str:
        return self.main_policy.finish(request)

    def record_hint(self, hint: LateHint) -> None:
        self.main_policy.record_hint(hint)
