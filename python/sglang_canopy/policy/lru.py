"""``lru``: least recently used, SGLang's default and the baseline of every figure.

If requests mark their whole path as used, this is LRU over blocks, the blocks of one request ordered
deepest first, so ``sim/stack.py`` computes every capacity in one pass.
"""

from __future__ import annotations

from typing import ClassVar

from sglang_canopy.policy.ranked import NoOptions, RankedPolicy
from sglang_canopy.records import Leaf


class LRU(RankedPolicy):
    """Evicts the leaf with the oldest last access. O(log n)."""

    name: ClassVar[str] = "lru"
    Config: ClassVar[type] = NoOptions
    reads_labels: ClassVar[bool] = False

    # victim = the leaf with the least last_access
    def rank(self, leaf: Leaf) -> float:
        return leaf.last_access


POLICY = LRU
