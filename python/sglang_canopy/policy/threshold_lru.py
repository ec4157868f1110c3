"""``threshold-lru``: cache a conversation only past a length (arXiv 2510.15152, the baseline).

Prompt caches of hosted models ignore short prompts. Here a path is "not cached" by being the
first to go: it may use space that nobody wants, and never pushes a longer one out.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

from sglang_canopy.policy.base import Leaf, Policy, Victim
from sglang_canopy.policy.heap import LazyHeap


@dataclass(frozen=True, slots=True)
class Config:
    threshold_tokens: int = 1024
    """Conversations (prompt and output, at their longest) below this go first."""

    def __post_init__(self) -> None:
        if self.threshold_tokens < 0:
            raise ValueError(
                f"key 'threshold_tokens' must be 0 or above, got {self.threshold_tokens}"
            )


class ThresholdLRU(Policy):
    """LRU among the leaves of short conversations, then among the others. O(log n)."""

    name: ClassVar[str] = "threshold-lru"
    Config: ClassVar[type] = Config

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self._heap = LazyHeap()

    def admit(self, leaf: Leaf, now: float) -> None:
        self._heap.push(leaf, leaf.history >= self.config.threshold_tokens)

    def drop(self, leaf: Leaf) -> None:
        self._heap.discard(leaf)

    # victim = the leaf with the least (history >= threshold, last_access)
    def victim(self, now: float) -> Victim | None:
        leaf = self._heap.least()
        return None if leaf is None else Victim(leaf)

    def leaves(self) -> Iterator[Leaf]:
        return iter(self._heap)


POLICY = ThresholdLRU
