"""A bounded table of workload categories, each with its reuse samples and fitted curves.

A request's category, as the client or the server gives it, is refined by the features that predict
reuse: stop reason, turn, output length (generating the output is part of the gap), new prompt
tokens of the turn, and the conversation's past gaps. Each refinement has a parent without its last
feature, so that a curve with few samples is shrunk towards a coarser one.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Callable, Iterator

from sglang_canopy.reuse.category import Category

ROOT = "*"
OVERFLOW = "overflow"
SHARED = "shared prefix"
NAME_CHARS = 64
"""Maximum length of a feature's name; longer names are cut."""


def _names(feature: str, edges: tuple[int, ...], unit: str = "") -> tuple[str, ...]:
    """Name the buckets at ``bisect_right(edges, number)``."""
    below = (f"{feature}<{edge}{unit}" for edge in edges)
    return (*below, f"{feature}>={edges[-1]}{unit}")


def _count_names(feature: str, edges: tuple[int, ...]) -> tuple[str, ...]:
    """Name the buckets at ``bisect_left(edges, count)``."""
    lows = (1, *(edge + 1 for edge in edges))
    within = (f"{low}" if low == edge else f"{low}-{edge}" for low, edge in zip(lows, edges))
    return (*(f"{feature}{counts}" for counts in within), f"{feature}{lows[-1]}+")


_STOPS = ("tool", "end", "length")
_TURN_EDGES = (1, 2, 4)
_TURN_NAMES = _count_names("turn", _TURN_EDGES)
_PAPERS_TURNS = 16
"""From this turn on, all turns share one category (Section 4.2: tens of categories)."""
_USE_EDGES = (2, 4, 8, 16)
_USE_NAMES = _count_names("uses", _USE_EDGES)
_ADDED_EDGES = (512, 4096)
_ADDED_NAMES = _names("added", _ADDED_EDGES)
_OUTPUT_EDGES = (64, 256, 512, 1024, 2048)
_OUTPUT_NAMES = _names("out", _OUTPUT_EDGES)
_OWN_GAP_EDGES_S = (2, 8, 30, 120)
_OWN_GAP_NAMES = _names("gap", _OWN_GAP_EDGES_S, "s")
_SHARED_GAP_EDGES_S = (1, 4, 16, 64, 256)
_SHARED_GAP_NAMES = _names("every", _SHARED_GAP_EDGES_S, "s")
_SHARED_LABELS = 1 + (len(_SHARED_GAP_EDGES_S) + 1) * (2 + len(_USE_EDGES))
"""Labels that ``shared_features`` can make: the name, gaps, and uses per gap."""


def features(
    category: str,
    stop: str | None,
    turn: int,
    output_tokens: int,
    own_gap_s: float | None,
    added_tokens: int | None = None,
) -> tuple[str, ...]:
    """Return the features of a request's label, coarsest first.

    After a tool call nearly every conversation continues, at its own pace, so its average gap
    refines the label. Otherwise the turn predicts whether it continues. ``added_tokens``: prompt
    tokens that this turn added.
    """
    name = category.replace("|", "/")[:NAME_CHARS]
    output = _OUTPUT_NAMES[bisect_right(_OUTPUT_EDGES, output_tokens)]
    if stop == "tool":
        names: tuple[str, ...] = (name, stop, output)
        if own_gap_s is not None:
            names = (*names, _OWN_GAP_NAMES[bisect_right(_OWN_GAP_EDGES_S, own_gap_s)])
        return names
    stop_name = stop if stop in _STOPS else "-"
    names = name, stop_name, _TURN_NAMES[bisect_left(_TURN_EDGES, turn)], output
    if added_tokens is None:
        return names
    return (*names, _ADDED_NAMES[bisect_right(_ADDED_EDGES, added_tokens)])


def type_turn_features(category: str, turn: int) -> tuple[str, ...]:
    """Return the ATC 2025 paper's category: request type and turn number (Section 3.3)."""
    name = category.replace("|", "/")[:NAME_CHARS]
    return name, f"turn{turn}" if turn < _PAPERS_TURNS else f"turn{_PAPERS_TURNS}+"


def shared_features(uses: int, average_gap_s: float) -> tuple[str, ...]:
    """Return the features of a prefix that several conversations share."""
    gap = _SHARED_GAP_NAMES[bisect_right(_SHARED_GAP_EDGES_S, average_gap_s)]
    return SHARED, gap, _USE_NAMES[bisect_left(_USE_EDGES, uses)]


class RequestedNames:
    """Requests for category names that are not in the table, for at most ``limit`` names: beyond that,
    all counts are halved."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._requested: dict[str, tuple[int, float]] = {}
        """Number of requests, and the time of the last request."""

    def __len__(self) -> int:
        return len(self._requested)

    def count(self, name: str, now: float) -> int:
        """Count a request for ``name`` at ``now``. Return its requests, at most one per time."""
        count, last = self._requested.get(name, (0, None))
        if last is None or last < now:
            count += 1
        self._requested[name] = (count, now)
        if len(self._requested) > self._limit:
            self._requested = {n: (c // 2, t) for n, (c, t) in self._requested.items() if c > 1}
        return count

    def forget(self, name: str) -> int:
        """Drop ``name``, which is in the table now. Return its earlier requests."""
        count, _ = self._requested.pop(name, (0, 0.0))
        return max(0, count - 1)


class Categories:
    """The table of labels: at most ``cap``, including the global label and the overflow.

    Names from requests take at most a quarter of the table, so that their refinements have room.
    Until the table is full, a tenant may have any number of labels. In a full table, a new label
    replaces the least recently used label of the tenant with the most labels, if that tenant has
    more than an eighth of the table and more than the requesting tenant; otherwise the request gets
    a coarser label. A tenant that invents names therefore takes no share from another.

    If many tenants fill the table within their shares, a tenant below its share of names gets a
    name once it has requested it more often than the table's least used name was used. Names
    invented for a single request therefore displace nothing. Shared prefixes have separate room.
    Labels without a sample in the window are dropped at the next fit.
    """

    def __init__(self, cap: int) -> None:
        self.cap = cap
        self.root = Category(ROOT, None)
        self.overflow = Category(OVERFLOW, self.root)
        self._table: dict[str, Category] = {ROOT: self.root, OVERFLOW: self.overflow}
        self._chains: dict[tuple[str, ...], Category] = {}
        self._shared_room = min(_SHARED_LABELS, cap // 4)
        self._shared = 0
        self._labels: Counter[str | None] = Counter()
        self._names: Counter[str | None] = Counter()
        self._requested = RequestedNames(cap)

    def __len__(self) -> int:
        return len(self._table)

    def __iter__(self) -> Iterator[Category]:
        """Iterate over categories, parents before their refinements."""
        return iter(self._table.values())

    def get(self, label: str) -> Category:
        """Return the category of a leaf's label. A label missing from the table maps to its nearest
        coarser label, or to the overflow."""
        category = self._table.get(label)
        while category is None and "|" in label:
            label = label.rpartition("|")[0]
            category = self._table.get(label)
        return self.overflow if category is None else category

    def refine(
        self, names: tuple[str, ...], tenant: str | None = None, now: float | None = None
    ) -> Category:
        """Return the finest category that has room, and mark it as used by ``tenant`` at ``now``.

        ``names``: features, coarse first. Without room, return the finest parent in the table, or
        the overflow if the first feature is not in the table.
        """
        category_of_chain = self._chains.get(names)
        if category_of_chain is not None:
            _touch(category_of_chain, now)
            return category_of_chain
        category = self.root
        label = ""
        for name in names:
            label = f"{label}|{name}" if label else name
            finer = self._table.get(label)
            if finer is None:
                top = category is self.root
                # Touch the parent first: making room for the refinement must not evict the parent.
                _touch(category, now)
                if not self._make_room(names[0] == SHARED, top, tenant) and not (
                    top and self._displace(name, tenant, now)
                ):
                    return self.overflow if top else category
                finer = self._add(label, category, tenant)
            category = finer
        self._chains[names] = category
        _touch(category, now)
        return category

    def forget_unused(self, horizon: float, now: float) -> None:
        """Drop the labels that no request used since ``horizon``."""
        for category in reversed(list(self._table.values())):
            if self._is_fixed(category) or category.children:
                continue
            if category.used_at is None:
                category.used_at = now
            elif category.used_at < horizon:
                self.forget(category)

    def forget(self, category: Category) -> None:
        """Drop a label without refinements; its samples move to the parent."""
        assert not category.children, f"{category.label} has refinements"
        assert self._table.get(category.label) is category, f"{category.label} is not in the table"
        parent = category.parent
        assert parent is not None, "the global category stays"
        del self._table[category.label]
        self._chains.clear()
        parent.children -= 1
        _take_one(self._labels, category.tenant)
        if parent is self.root:
            _take_one(self._names, category.tenant)
        for into, counts in (
            (parent.events, category.events),
            (parent.growth, category.growth),
            (parent.waiting, category.waiting),
        ):
            for i, count in enumerate(counts):
                into[i] += count
        parent.gap_sum_s += category.gap_sum_s
        parent.growth_sum += category.growth_sum
        category.merged = parent

    def _add(self, label: str, parent: Category, tenant: str | None) -> Category:
        # Copy the parent's curves until the next fit. The time of the first request for a label
        # depends on when a tree admits a leaf, and must not change a rank.
        category = self._table[label] = Category(
            label, parent, curve=parent.curve, exponential=parent.exponential, tenant=tenant
        )
        parent.children += 1
        if parent is self.root:
            category.uses = self._requested.forget(label)
        if self._is_fixed(category):
            self._shared += 1
        else:
            self._labels[tenant] += 1
            self._names[tenant] += parent is self.root
        return category

    def _make_room(self, shared: bool, top: bool, tenant: str | None) -> bool:
        """Return whether one more label fits, evicting another label if necessary."""
        if shared:
            return self._shared < self._shared_room
        full = top and self._names.total() >= max(1, self.cap // 4)
        if full and not self._reclaim(self._names, self.cap // 32, tenant, self._forget_name):
            return False
        if self._labels.total() < self.cap - self._shared_room - 2:
            return True
        return self._reclaim(self._labels, self.cap // 8, tenant, self._forget_label)

    @staticmethod
    def _reclaim(
        counts: Counter[str | None],
        share: int,
        tenant: str | None,
        forget: Callable[[str | None], bool],
    ) -> bool:
        """Drop a label of the tenant with the most labels, if that tenant has more than ``share``
        and more than ``tenant``."""
        most = max(counts.values())
        if most <= max(share, counts[tenant] + 1):
            return False
        return forget(next(other for other, count in counts.items() if count == most))

    def _displace(self, name: str, tenant: str | None, now: float | None) -> bool:
        """Count a request for ``name``; return whether it displaced another tenant's name."""
        if now is None or self._names[tenant] >= max(1, self.cap // 32):
            return False
        requests = self._requested.count(name, now)
        candidates = [
            category
            for category in self._table.values()
            if category.parent is self.root
            and category.tenant != tenant
            and not self._is_fixed(category)
        ]
        least = min(candidates, key=lambda c: (c.uses, _last_use(c)), default=None)
        if least is None or requests <= least.uses:
            return False
        self._forget_tree(least)
        return True

    def _forget_label(self, tenant: str | None) -> bool:
        candidates = [
            category
            for category in self._table.values()
            if category.tenant == tenant and not category.children and not self._is_fixed(category)
        ]
        if not candidates:
            return False
        self.forget(min(candidates, key=_last_use))
        return True

    def _forget_name(self, tenant: str | None) -> bool:
        name = min(
            (
                category
                for category in self._table.values()
                if category.parent is self.root
                and category.tenant == tenant
                and not self._is_fixed(category)
            ),
            key=_last_use,
        )
        self._forget_tree(name)
        return True

    def _forget_tree(self, name: Category) -> None:
        """Drop a name and all its refinements."""
        for category in reversed(list(self._table.values())):
            if category is name or category.label.startswith(f"{name.label}|"):
                self.forget(category)

    @staticmethod
    def _is_fixed(category: Category) -> bool:
        return category.label in (ROOT, OVERFLOW) or category.label.partition("|")[0] == SHARED


def _touch(category: Category | None, now: float | None) -> None:
    """Record a use of ``category`` and of all its parents."""
    if now is None:
        return
    while category is not None and (category.used_at is None or category.used_at < now):
        category.used_at = now
        category.uses += 1
        category = category.parent


def _take_one(counts: Counter[str | None], tenant: str | None) -> None:
    counts[tenant] -= 1
    if not counts[tenant]:
        del counts[tenant]


def _last_use(category: Category) -> float:
    return -math.inf if category.used_at is None else category.used_at
