"""``threshold-lru``: cache a conversation only past a length (arXiv 2510.15152, the baseline).

Prompt caches of hosted models ignore short prompts. Here a path is "not cached" by being the
first to go: it may use space that nobody wants, and never pushes a longer one out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from sglang_canopy import declared
from sglang_canopy.declared import declare_key
from sglang_canopy.policy.ranked import RankedPolicy
from sglang_canopy.records import Leaf


@dataclass(frozen=True, slots=True)
class Config:
    threshold_tokens: int = declare_key(
        1024,
        "Conversations (prompt and output, at their longest) below this go first.",
        low=0,
    )

    def __post_init__(self) -> None:
        declared.check(self)


class ThresholdLRU(RankedPolicy):
    """LRU among the leaves of short conversations, then among the others. O(log n)."""

    name: ClassVar[str] = "threshold-lru"
    Config: ClassVar[type] = Config
    reads_labels: ClassVar[bool] = False

    # victim = the leaf with the least (history >= threshold, last_access)
    def rank(self, leaf: Leaf) -> bool:
        return leaf.history >= self.config.threshold_tokens


POLICY = ThresholdLRU
