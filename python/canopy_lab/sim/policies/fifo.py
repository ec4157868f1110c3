"""``fifo``: first in, first out, by a node's creation time, independent of its use.

Only leaves can be evicted, so an old prefix stays while it has younger descendants.
"""

from __future__ import annotations

from typing import ClassVar

from sglang_canopy.policy.ranked import NoOptions, RankedPolicy
from sglang_canopy.records import Leaf


class FIFO(RankedPolicy):
    """Evicts the leaf that was cached first. O(log n)."""

    name: ClassVar[str] = "fifo"
    Config: ClassVar[type] = NoOptions
    reads_labels: ClassVar[bool] = False

    # victim = the leaf with the least created
    def rank(self, leaf: Leaf) -> float:
        return leaf.created


POLICY = FIFO
