"""``lfu``: least frequently used, ties by recency.

A leaf's frequency is the number of requests that used it since it was cached. It is lost when the
leaf is evicted (in-cache LFU, as in libCacheSim and SGLang).
"""

from __future__ import annotations

from typing import ClassVar

from sglang_canopy.policy.ranked import NoOptions, RankedPolicy
from sglang_canopy.records import Leaf


class LFU(RankedPolicy):
    """Evicts the leaf with the fewest uses; among equals, the least recent. O(log n)."""

    name: ClassVar[str] = "lfu"
    Config: ClassVar[type] = NoOptions
    reads_labels: ClassVar[bool] = False

    # victim = the leaf with the least (hits, last_access)
    def rank(self, leaf: Leaf) -> int:
        return leaf.hits


POLICY = LFU
