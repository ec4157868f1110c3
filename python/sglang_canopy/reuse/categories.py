"""The workload categories a policy keeps curves and queues for: refined, and bounded.

A request's category as the client or the server gives it is refined by what decides reuse:
the turn, why the response stopped, and how long this conversation let the cache wait before.
Each refinement has a parent without it, so that a curve with few samples leans on a coarser one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from sglang_canopy.reuse.bins import BINS, TOKEN_BINS

OVERFLOW = "overflow"
_TURN_EDGES = (1, 2, 4, 8, 16)
_TURN_NAMES = ("1", "2", "3-4", "5-8", "9-16", "17+")
GAP_EDGES_S = (2.0, 8.0, 30.0, 120.0)
GAP_NAMES = ("<2s", "<8s", "<30s", "<120s", ">120s")
_STOPS = ("tool", "end", "length")


@dataclass(slots=True, eq=False)
class Category:
    """One label with the samples of the sliding window, and what was last fitted to them.

    ``events``, ``censored`` and ``growth`` count this label's own samples; the ``all_``
    lists, made at every refresh, add those of its refinements.
    """

    label: str
    parent: Category | None
    rank: list[float] = field(default_factory=lambda: [0.0] * BINS)
    """Rank of a leaf by age bin: lowest goes first."""
    curve: list[float] = field(default_factory=lambda: [1.0] * BINS)
    grows: list[float] = field(default_factory=lambda: [1.0] * TOKEN_BINS)
    """P(the next prompt adds more than ``TOKEN_EDGES[i]`` tokens)."""
    events: list[float] = field(default_factory=lambda: [0.0] * BINS)
    censored: list[float] = field(default_factory=lambda: [0.0] * BINS)
    growth: list[float] = field(default_factory=lambda: [0.0] * TOKEN_BINS)
    gap_sum_s: float = 0.0
    life_sum_s: float = 0.0
    lives: float = 0.0
    all_events: list[float] = field(default_factory=list)
    all_censored: list[float] = field(default_factory=list)
    all_growth: list[float] = field(default_factory=list)


def turn_bucket(turn: int) -> str:
    """Name of the bucket of a turn; turns below 1 count as 1."""
    for edge, name in zip(_TURN_EDGES, _TURN_NAMES):
        if turn <= edge:
            return name
    return _TURN_NAMES[-1]


def gap_bucket(average_s: float | None) -> str:
    """Name of the bucket of a conversation's own average gap; ``"-"`` when it has none."""
    if average_s is None:
        return "-"
    for edge, name in zip(GAP_EDGES_S, GAP_NAMES):
        if average_s < edge:
            return name
    return GAP_NAMES[-1]


class Categories:
    """The table of labels, at most ``cap`` of them, the global one and the overflow included."""

    def __init__(self, cap: int) -> None:
        self.cap = cap
        self.root = Category("*", None)
        self.overflow = Category(OVERFLOW, self.root)
        self._table: dict[str, Category] = {"*": self.root, OVERFLOW: self.overflow}
        self._chains: dict[tuple[str, ...], Category] = {}

    def __len__(self) -> int:
        return len(self._table)

    def __iter__(self) -> Iterator[Category]:
        """Parents before their refinements."""
        return iter(self._table.values())

    def get(self, label: str) -> Category:
        """The category of a label a leaf carries; the overflow for one that is not known."""
        return self._table.get(label, self.overflow)

    def refine(self, *features: str) -> Category:
        """The finest category there is room for, coarse feature first.

        A full table answers with the finest parent it already has, and with the overflow
        category for a first feature it has never seen.
        """
        found = self._chains.get(features)
        if found is not None:
            return found
        category = self.root
        label = ""
        for feature in features:
            label = f"{label}|{feature}" if label else feature
            known = self._table.get(label)
            if known is None:
                if len(self._table) >= self.cap:
                    return self.overflow if category is self.root else category
                known = self._table[label] = Category(label, category)
            category = known
        self._chains[features] = category
        return category
