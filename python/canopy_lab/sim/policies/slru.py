"""``slru``: segmented LRU (Karedla et al., 1994), probation before protection.

A leaf used ``protected_hits`` times or more is protected. If the protected leaves exceed their
share of the evictable tokens, the least recent is demoted to the young end of probation until its
next use. With ``protected_share`` 1.0 no leaf is demoted, as in SGLang's own ``slru``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

from sglang_canopy import declared
from sglang_canopy.declared import declare_key
from sglang_canopy.policy.base import Policy, Victim
from sglang_canopy.policy.structures.lazy_heap import LazyHeap
from sglang_canopy.records import Leaf


@dataclass(frozen=True, slots=True)
class Config:
    protected_hits: int = declare_key(
        2, "Uses, the one that cached the leaf included, that make it protected.", low=1
    )
    protected_share: float = declare_key(
        0.8, "Share of the evictable tokens that may be protected.", low=0, high=1
    )

    def __post_init__(self) -> None:
        declared.check(self)


class SLRU(Policy):
    """LRU among probationary leaves, then among protected ones. O(log n).

    ``Leaf.slot`` is ``(hits, time)`` of its demotion, and valid until the leaf's next use.
    """

    name: ClassVar[str] = "slru"
    Config: ClassVar[type] = Config
    reads_labels: ClassVar[bool] = False

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self._probation, self._protected = LazyHeap(), LazyHeap()
        self._tokens = {self._probation: 0, self._protected: 0}
        self._lengths: dict[Leaf, int] = {}

    def admit(self, leaf: Leaf, now: float) -> None:
        demoted = leaf.slot
        if demoted is not None and demoted[0] == leaf.hits:
            self._push(self._probation, leaf, demoted[1])
            return
        leaf.slot = None
        if leaf.hits < self.config.protected_hits:
            self._push(self._probation, leaf, leaf.last_access)
            return
        self._push(self._protected, leaf, leaf.last_access)

    def drop(self, leaf: Leaf) -> None:
        for segment in (self._probation, self._protected):
            if segment.discard(leaf):
                self._tokens[segment] -= self._lengths.pop(leaf)

    # while protected > its share: the least recent protected leaf becomes probationary
    # victim = the least recent probationary leaf, or else the least recent protected one
    def victim(self, now: float) -> Victim | None:
        self._demote(now)
        leaf = self._probation.least() or self._protected.least()
        return None if leaf is None else Victim(leaf)

    def split(self, leaf: Leaf, head: Leaf) -> None:
        head.slot = leaf.slot
        if leaf in self._lengths:
            segment = self._protected if leaf in self._protected else self._probation
            self._tokens[segment] += leaf.length - self._lengths[leaf]
            self._lengths[leaf] = leaf.length

    def leaves(self) -> Iterator[Leaf]:
        return iter(self._lengths)

    def _push(self, segment: LazyHeap, leaf: Leaf, time_s: float) -> None:
        segment.push(leaf, time_s)
        self._lengths[leaf] = leaf.length
        self._tokens[segment] += leaf.length

    def _demote(self, now: float) -> None:
        share = self.config.protected_share
        while self._tokens[self._protected] > share * sum(self._tokens.values()):
            oldest = self._protected.least()
            if oldest is None or len(self._protected) == 1:
                return
            self.drop(oldest)
            oldest.slot = (oldest.hits, now)
            self._push(self._probation, oldest, now)


POLICY = SLRU
