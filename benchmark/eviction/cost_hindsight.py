"""Hindsight by cost: evict the blocks whose next use is furthest away for their price.

The rank is (requests until the next use) / (1 + depth / s), as the rank of ``depth_weight`` but with
the trace's future in place of the learnt one. It is a heuristic and no bound: to evict by cost
optimally is a knapsack problem.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from canopy_lab.sim.hindsight.future import Future, HindsightPolicy
from sglang_canopy.policy.base import Victim
from sglang_canopy.policy.structures.lazy_heap import LazyHeap
from sglang_canopy.records import Leaf
from sglang_canopy.reuse.depth_price import depth_bucket, depth_factor


class CostHindsight(HindsightPolicy):
    """One heap of next uses for each half octave of depth; their least leaves compete."""

    name = "hindsight-by-cost"

    def __init__(self, future: Future, scale: float) -> None:
        super().__init__(None, future)
        self._scale, self._requests = scale, 0
        self._heaps: dict[int, LazyHeap] = {}
        self._heap_of: dict[Leaf, LazyHeap] = {}

    def arrive(self, request: Any) -> str:
        self._requests += 1
        return super().arrive(request)

    def admit(self, leaf: Leaf, now: float) -> None:
        heap = self._heaps.setdefault(depth_bucket(leaf.offset + leaf.length), LazyHeap())
        heap.push(leaf, -self.future.last_run(leaf).next_use)
        self._heap_of[leaf] = heap

    def drop(self, leaf: Leaf) -> None:
        heap = self._heap_of.pop(leaf, None)
        if heap is not None:
            heap.discard(leaf)

    def victim(self, now: float) -> Victim | None:
        found, most = None, -1.0
        for bucket, heap in self._heaps.items():
            leaf = heap.least()
            if leaf is None:
                continue
            away = -heap.rank(leaf) - self._requests + 1
            score = away / depth_factor(bucket, self._scale)
            if score > most:
                found, most = leaf, score
        if found is None:
            return None
        keep = self.future.last_run(found).start * self.future.block_tokens - found.offset
        return Victim(found, max(keep, 0))

    def leaves(self) -> Iterator[Leaf]:
        return iter(self._heap_of)
