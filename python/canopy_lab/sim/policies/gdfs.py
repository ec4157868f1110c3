"""``gdfs``: greedy dual, size and frequency (Cherkasova, 1998), with prefill cost as the cost.

A leaf's value is ``clock + frequency * cost / size``. The clock is the value of the last evicted
leaf, so leaves without use fall behind it. Size is in tokens. Cost is the leaf's prefill cost, in
units of one token without attention. With attention a token at depth d costs
``1 + d / attention_tokens``, so deep segments are worth more per token.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

from sglang_canopy import declared
from sglang_canopy.declared import declare_key
from sglang_canopy.policy.base import Policy, Victim
from sglang_canopy.policy.structures.lazy_heap import LazyHeap
from sglang_canopy.records import Leaf

_MAX_TICKS = 1 << 16


@dataclass(frozen=True, slots=True)
class Config(declared.Checked):
    cost: str = declare_key(
        "quadratic",
        "``quadratic`` counts attention over the prefix; ``linear`` is LFU with ageing.",
        choices=("linear", "quadratic"),
    )
    attention_tokens: float = declare_key(
        27_000.0,
        "Depth at which attention costs a token as much as all else (27,000: Llama 3.1 8B).",
        low=1,
    )


class GDFS(Policy):
    """Evicts the leaf of least ``clock + frequency * cost / size``. O(log n).

    A leaf's value uses the clock at its last use. A parent is only admitted after its last child
    was evicted, long after that use, so past clocks are kept.
    """

    name: ClassVar[str] = "gdfs"
    Config: ClassVar[type] = Config
    reads_labels: ClassVar[bool] = False

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self._heap = LazyHeap()
        self._ticks: list[float] = [float("-inf")]
        self._clocks: list[float] = [0.0]
        self._chosen: tuple[Leaf | None, float, float] = (None, 0.0, 0.0)

    def admit(self, leaf: Leaf, now: float) -> None:
        clock = self._clocks[bisect_right(self._ticks, leaf.last_access) - 1]
        self._heap.push(leaf, clock + leaf.hits * self._worth(leaf))

    def drop(self, leaf: Leaf) -> None:
        self._heap.discard(leaf)

    # value(leaf) = the clock at its last use + hits * cost / size
    # victim = the leaf with the least value; clock = its value, once it is evicted
    def victim(self, now: float) -> Victim | None:
        leaf = self._heap.least()
        if leaf is None:
            return None
        self._chosen = (leaf, self._heap.rank(leaf), now)
        return Victim(leaf)

    def evicted(self, leaf: Leaf, tokens: int) -> None:
        chosen, value, now = self._chosen
        if chosen is not leaf or value <= self._clocks[-1]:
            return
        if self._ticks[-1] == now:
            self._clocks[-1] = value
            return
        self._ticks.append(now)
        self._clocks.append(value)
        if len(self._ticks) > _MAX_TICKS:
            # Drop every second past tick: the clock becomes coarser, but keeps its order.
            self._ticks, self._clocks = self._ticks[::2], self._clocks[::2]

    def split(self, leaf: Leaf, head: Leaf) -> None:
        if self._heap.discard(leaf):
            self.admit(leaf, leaf.last_access)

    def leaves(self) -> Iterator[Leaf]:
        return iter(self._heap)

    def _worth(self, leaf: Leaf) -> float:
        """Return the cost per token, averaged over the leaf's tokens."""
        if self.config.cost == "linear":
            return 1.0
        return 1.0 + (leaf.offset + leaf.length / 2) / self.config.attention_tokens


POLICY = GDFS
