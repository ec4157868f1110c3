"""``threshold-lru``: cache conversations above a length only (arXiv 2510.15152, the baseline).

Prompt caches of hosted models ignore short prompts. Here a short conversation's path is evicted
first: it may use free space, and never displaces a longer conversation.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from sglang_canopy import declared
from sglang_canopy.declared import declare_key
from sglang_canopy.policy.ranked import RankedPolicy
from sglang_canopy.records import Leaf


@dataclass(frozen=True, slots=True)
class Config(declared.Checked):
    """Options of ``threshold-lru``."""

    threshold_tokens: int = declare_key(
        1024,
        "Conversations whose longest prompt and output are below this are evicted first.",
        low=0,
    )


class ThresholdLRU(RankedPolicy):
    """LRU over the leaves of short conversations first, then over the rest. O(log n)."""

    name: ClassVar[str] = "threshold-lru"
    Config: ClassVar[type] = Config
    reads_labels: ClassVar[bool] = False

    # victim = the leaf with the least (history >= threshold, last_access)
    def rank(self, leaf: Leaf) -> bool:
        return leaf.history >= self.config.threshold_tokens


POLICY = ThresholdLRU
