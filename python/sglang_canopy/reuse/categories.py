"""The workload categories a policy keeps curves and queues for: refined, and bounded.

A request's category as the client or the server gives it is refined by what decides reuse:
why the response stopped, the turn, the length of the output (its generation is part of the
gap), and how long this conversation let the cache wait before. Each refinement has a parent
without it, so that a curve with few samples leans on a coarser one.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

from sglang_canopy.reuse.bins import BINS, TOKEN_BINS

ROOT = "*"
OVERFLOW = "overflow"
SHARED = "shared prefix"
NAME_CHARS = 64
"""Longest name of a feature; the rest is cut."""

_STOPS = ("tool", "end", "length")
_TURN_EDGES = (1, 2, 4)
_USE_EDGES = (2, 4, 8, 16)
_OUTPUT_EDGES = (64, 256, 512, 1024, 2048)
_OWN_GAP_EDGES_S = (2, 8, 30, 120)
_SHARED_GAP_EDGES_S = (1, 4, 16, 64, 256)


@dataclass(slots=True, eq=False)
class Category:
    """One label with the samples of the sliding window, and what was last fitted to them.

    ``events``, ``waiting`` and ``growth`` count this label's own samples; the ``all_`` lists,
    made at every fit, add those of its refinements and of a restored profile.
    """

    label: str
    parent: Category | None
    rank: list[float] = field(default_factory=lambda: [0.0] * BINS)
    """Rank of a leaf by age bin: lowest goes first."""
    curve: list[float] = field(default_factory=lambda: [1.0] * BINS)
    """Probability that nothing has continued a tip, at each edge of the age bins."""
    grows: list[float] = field(default_factory=lambda: [1.0] * TOKEN_BINS)
    """P(the next prompt adds at least ``TOKEN_EDGES[i]`` tokens)."""
    events: list[float] = field(default_factory=lambda: [0.0] * BINS)
    waiting: list[float] = field(default_factory=lambda: [0.0] * BINS)
    growth: list[float] = field(default_factory=lambda: [0.0] * TOKEN_BINS)
    gap_sum_s: float = 0.0
    growth_sum: float = 0.0
    life_s: float = 0.0
    """Expected lifespan of what is reused: from its birth to its conversation's last request."""
    life_sum_s: float = 0.0
    lives: float = 0.0
    all_events: list[float] = field(default_factory=list)
    all_waiting: list[float] = field(default_factory=list)
    all_growth: list[float] = field(default_factory=list)
    all_gap_sum_s: float = 0.0
    all_growth_sum: float = 0.0
    rate: float = 0.0
    """Of the exponential model, in 1/s: one over the mean reuse gap; 0 while not fitted."""
    saved: dict[str, list[float]] | None = None
    """Counts of a restored profile: ``events``, ``waiting``, ``growth``, ``sums``."""

    def reuse_probability(self, age_s: float) -> float:
        """The ATC 2025 paper's ReuseProb_w(t, life) of the fitted exponential; 0 before a fit.

        The probability that it puts the reuse in (t, t + life], a difference of the distribution
        function: exp(-rate t) - exp(-rate (t + life)). It is not conditioned on "not reused until
        t": an exponential has no memory, so that would cancel t and leave a constant.
        """
        return math.exp(-self.rate * max(0.0, age_s)) * -math.expm1(-self.rate * self.life_s)


def _bucket(value: float, edges: tuple[int, ...], unit: str = "") -> str:
    for edge in edges:
        if value < edge:
            return f"<{edge}{unit}"
    return f">={edges[-1]}{unit}"


def _count_bucket(value: int, edges: tuple[int, ...]) -> str:
    low = 1
    for edge in edges:
        if value <= edge:
            return str(low) if low >= edge else f"{low}-{edge}"
        low = edge + 1
    return f"{low}+"


def features(
    category: str, stop: str | None, turn: int, output_tokens: int, own_gap_s: float | None
) -> tuple[str, ...]:
    """What refines a request's category, coarsest first.

    After a tool call nearly every conversation goes on, and how soon depends on the
    conversation: its own average gap refines. Otherwise the turn says how likely it goes on.
    """
    name = category.replace("|", "/")[:NAME_CHARS]
    output = "out" + _bucket(output_tokens, _OUTPUT_EDGES)
    if stop == "tool":
        if own_gap_s is None:
            return name, stop, output
        return name, stop, output, "gap" + _bucket(own_gap_s, _OWN_GAP_EDGES_S, "s")
    known = stop if stop in _STOPS else "-"
    return name, known, "turn" + _count_bucket(max(1, turn), _TURN_EDGES), output


def shared_features(uses: int, average_gap_s: float) -> tuple[str, ...]:
    """The same for a prefix that several conversations run through."""
    gap = "every" + _bucket(average_gap_s, _SHARED_GAP_EDGES_S, "s")
    return SHARED, gap, "uses" + _count_bucket(max(2, uses), _USE_EDGES)


class Categories:
    """The table of labels, at most ``cap`` of them, the global one and the overflow included.

    A quarter of the table at most goes to names given from outside, so that nobody fills it by
    inventing categories.
    """

    def __init__(self, cap: int) -> None:
        self.cap = cap
        self.root = Category(ROOT, None)
        self.overflow = Category(OVERFLOW, self.root)
        self._table: dict[str, Category] = {ROOT: self.root, OVERFLOW: self.overflow}
        self._chains: dict[tuple[str, ...], Category] = {}
        self._names = 0

    def __len__(self) -> int:
        return len(self._table)

    def __iter__(self) -> Iterator[Category]:
        """Parents before their refinements."""
        return iter(self._table.values())

    def get(self, label: str) -> Category:
        """The category of a label a leaf carries; the overflow for one that is not known."""
        return self._table.get(label, self.overflow)

    def refine(self, names: tuple[str, ...]) -> Category:
        """The finest category there is room for, coarse feature first.

        A full table answers with the finest parent it already has, and with the overflow
        category for a first feature it has never seen.
        """
        found = self._chains.get(names)
        if found is not None:
            return found
        category = self.root
        label = ""
        for name in names:
            label = f"{label}|{name}" if label else name
            known = self._table.get(label)
            if known is None:
                top = category is self.root
                if len(self._table) >= self.cap or (top and 4 * self._names >= self.cap):
                    return self.overflow if top else category
                self._names += top
                # Until the next fit it is what it refines: when it is first asked for, which
                # depends on when a tree admits a leaf, must not change a rank.
                known = self._table[label] = Category(
                    label,
                    category,
                    rank=list(category.rank),
                    curve=list(category.curve),
                    grows=list(category.grows),
                    life_s=category.life_s,
                )
            category = known
        self._chains[names] = category
        return category
