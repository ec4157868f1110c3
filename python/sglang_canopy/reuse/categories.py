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
MAX_NAME_CHARS = 64
"""Maximum length of a feature's name; longer names are cut."""


def _bucket_names(feature: str, edges: tuple[int, ...], unit: str = "") -> tuple[str, ...]:
    """Name the buckets at ``bisect_right(edges, number)``."""
    below = (f"{feature}<{edge}{unit}" for edge in edges)
    return (*below, f"{feature}>={edges[-1]}{unit}")


def _count_bucket_names(feature: str, edges: tuple[int, ...]) -> tuple[str, ...]:
    """Name the buckets at ``bisect_left(edges, count)``."""
    lows = (1, *(edge + 1 for edge in edges))
    within = (f"{low}" if low == edge else f"{low}-{edge}" for low, edge in zip(lows, edges))
    return (*(f"{feature}{counts}" for counts in within), f"{feature}{lows[-1]}+")


_STOPS = ("tool", "end", "length")
_TURN_EDGES = (1, 2, 4)
_TURN_NAMES = _count_bucket_names("turn", _TURN_EDGES)
_MAX_PAPER_TURN = 16
"""From this turn on, all turns share one category (Section 4.2: tens of categories)."""
_USE_EDGES = (2, 4, 8, 16)
_USE_NAMES = _count_bucket_names("uses", _USE_EDGES)
_ADDED_EDGES = (512, 4096)
_ADDED_NAMES = _bucket_names("added", _ADDED_EDGES)
_OUTPUT_EDGES = (64, 256, 512, 1024, 2048)
_OUTPUT_NAMES = _bucket_names("out", _OUTPUT_EDGES)
_OWN_GAP_EDGES_S = (2, 8, 30, 120)
_OWN_GAP_NAMES = _bucket_names("gap", _OWN_GAP_EDGES_S, "s")
_SHARED_GAP_EDGES_S = (1, 4, 16, 64, 256)
_SHARED_GAP_NAMES = _bucket_names("every", _SHARED_GAP_EDGES_S, "s")
_SHARED_LABEL_COUNT = 1 + (len(_SHARED_GAP_EDGES_S) + 1) * (2 + len(_USE_EDGES))
"""Labels that ``shared_features`` can make: the name, gaps, and uses per gap."""


def label_features(
    category: str,
    stop: str | None,
    turn: int,
    output_tokens: int,
    own_gap_s: float | None,
    added_tokens: int | None = None,
) -> tuple[str, ...]:
    """Return the features of a request's label, coarsest first. After a tool call nearly every
    conversation continues, at its own pace, so its average gap refines the label. Otherwise the turn
    predicts whether it continues. ``added_tokens``: prompt tokens that this turn added."""
    name = category.replace("|", "/")[:MAX_NAME_CHARS]
    output_bucket = _OUTPUT_NAMES[bisect_right(_OUTPUT_EDGES, output_tokens)]
    if stop == "tool":
        features: tuple[str, ...] = (name, stop, output_bucket)
        if own_gap_s is not None:
            features = (*features, _OWN_GAP_NAMES[bisect_right(_OWN_GAP_EDGES_S, own_gap_s)])
        return features
    stop_name = stop if stop in _STOPS else "-"
    features = name, stop_name, _TURN_NAMES[bisect_left(_TURN_EDGES, turn)], output_bucket
    if added_tokens is None:
        return features
    return (*features, _ADDED_NAMES[bisect_right(_ADDED_EDGES, added_tokens)])


def type_turn_features(category: str, turn: int) -> tuple[str, ...]:
    """Return the ATC 2025 paper's category: request type and turn number (Section 3.3)."""
    name = category.replace("|", "/")[:MAX_NAME_CHARS]
    return name, f"turn{turn}" if turn < _MAX_PAPER_TURN else f"turn{_MAX_PAPER_TURN}+"


def shared_features(uses: int, average_gap_s: float) -> tuple[str, ...]:
    """Return the features of a prefix that several conversations share."""
    gap_bucket = _SHARED_GAP_NAMES[bisect_right(_SHARED_GAP_EDGES_S, average_gap_s)]
    return SHARED, gap_bucket, _USE_NAMES[bisect_left(_USE_EDGES, uses)]


class RequestedNames:
    """Requests for category names that are not in the table, for at most ``max_names`` names: beyond that,
    all counts are halved."""

    def __init__(self, max_names: int) -> None:
        self._max_names = max_names
        self._count_and_last_time: dict[str, tuple[int, float]] = {}
        """Number of requests, and the time of the last request."""

    def __len__(self) -> int:
        return len(self._count_and_last_time)

    def count_request(self, name: str, now: float) -> int:
        """Count a request for ``name``, at most one per time ``now``. Return the count."""
        count, last_time = self._count_and_last_time.get(name, (0, None))
        if last_time is None or last_time < now:
            count += 1
        self._count_and_last_time[name] = (count, now)
        if len(self._count_and_last_time) > self._max_names:
            entries = self._count_and_last_time.items()
            halves = {key: (total // 2, last) for key, (total, last) in entries if total > 1}
            self._count_and_last_time = halves
        return count

    def forget(self, name: str) -> int:
        """Drop ``name``, which is in the table now. Return its earlier requests."""
        count, _ = self._count_and_last_time.pop(name, (0, 0.0))
        return max(0, count - 1)


class Categories:
    """The table of labels: at most ``max_labels``, including the global label and the overflow.

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

    def __init__(self, max_labels: int) -> None:
        self.max_labels = max_labels
        self.root = Category(ROOT, None)
        self.overflow = Category(OVERFLOW, self.root)
        self._table: dict[str, Category] = {ROOT: self.root, OVERFLOW: self.overflow}
        self._category_by_features: dict[tuple[str, ...], Category] = {}
        self._max_shared_labels = min(_SHARED_LABEL_COUNT, max_labels // 4)
        self._shared_label_count = 0
        self._labels_by_tenant: Counter[str | None] = Counter()
        self._names_by_tenant: Counter[str | None] = Counter()
        self._requested_names = RequestedNames(max_labels)

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
        self, features: tuple[str, ...], tenant: str | None = None, now: float | None = None
    ) -> Category:
        """Return the finest category that has room, and mark it as used by ``tenant`` at ``now``.
        ``features``: coarse first. Without room, return the finest parent in the table, or the
        overflow if the first feature is not in the table."""
        known_category = self._category_by_features.get(features)
        if known_category is not None:
            _mark_used(known_category, now)
            return known_category
        category = self.root
        label = ""
        for name in features:
            label = f"{label}|{name}" if label else name
            finer = self._table.get(label)
            if finer is None:
                is_name = category is self.root
                # Touch the parent first: making room for the refinement must not evict the parent.
                _mark_used(category, now)
                if not self._make_room(features[0] == SHARED, is_name, tenant) and not (
                    is_name and self._displace(name, tenant, now)
                ):
                    return self.overflow if is_name else category
                finer = self._add(label, category, tenant)
            category = finer
        self._category_by_features[features] = category
        _mark_used(category, now)
        return category

    def forget_unused(self, horizon: float, now: float) -> None:
        """Drop the labels that no request used since ``horizon``."""
        for category in reversed(list(self._table.values())):
            if self._is_fixed(category) or category.child_count:
                continue
            if category.used_at is None:
                category.used_at = now
            elif category.used_at < horizon:
                self.forget(category)

    def forget(self, category: Category) -> None:
        """Drop a label without refinements; its samples move to the parent."""
        assert not category.child_count, f"{category.label} has refinements"
        assert self._table.get(category.label) is category, f"{category.label} is not in the table"
        parent = category.parent
        assert parent is not None, "the global category stays"
        del self._table[category.label]
        self._category_by_features.clear()
        parent.child_count -= 1
        _decrement(self._labels_by_tenant, category.tenant)
        if parent is self.root:
            _decrement(self._names_by_tenant, category.tenant)
        for totals, counts in (
            (parent.events, category.events),
            (parent.growth, category.growth),
            (parent.waiting, category.waiting),
        ):
            for i, count in enumerate(counts):
                totals[i] += count
        parent.gap_sum_s += category.gap_sum_s
        parent.growth_sum_tokens += category.growth_sum_tokens
        category.merged_into = parent

    def _add(self, label: str, parent: Category, tenant: str | None) -> Category:
        # Copy the parent's curves until the next fit. The time of the first request for a label
        # depends on when a tree admits a leaf, and must not change a rank.
        category = self._table[label] = Category(
            label, parent, curve=parent.curve, exponential=parent.exponential, tenant=tenant
        )
        parent.child_count += 1
        if parent is self.root:
            category.use_count = self._requested_names.forget(label)
        if self._is_fixed(category):
            self._shared_label_count += 1
        else:
            self._labels_by_tenant[tenant] += 1
            self._names_by_tenant[tenant] += parent is self.root
        return category

    def _make_room(self, is_shared: bool, is_name: bool, tenant: str | None) -> bool:
        """Return whether one more label fits, evicting another label if necessary."""
        if is_shared:
            return self._shared_label_count < self._max_shared_labels
        is_full = is_name and self._names_by_tenant.total() >= max(1, self.max_labels // 4)
        if is_full and not self._reclaim(
            self._names_by_tenant, self.max_labels // 32, tenant, self._forget_name
        ):
            return False
        if self._labels_by_tenant.total() < self.max_labels - self._max_shared_labels - 2:
            return True
        return self._reclaim(
            self._labels_by_tenant, self.max_labels // 8, tenant, self._forget_label
        )

    @staticmethod
    def _reclaim(
        counts: Counter[str | None],
        max_labels: int,
        tenant: str | None,
        forget: Callable[[str | None], bool],
    ) -> bool:
        """Drop a label of the tenant with the most labels, if that tenant has more than ``max_labels``
        and more than ``tenant``."""
        max_count = max(counts.values())
        if max_count <= max(max_labels, counts[tenant] + 1):
            return False
        return forget(next(other for other, count in counts.items() if count == max_count))

    def _displace(self, name: str, tenant: str | None, now: float | None) -> bool:
        """Count a request for ``name``; return whether it displaced another tenant's name."""
        if now is None or self._names_by_tenant[tenant] >= max(1, self.max_labels // 32):
            return False
        request_count = self._requested_names.count_request(name, now)
        candidates = [
            category
            for category in self._table.values()
            if category.parent is self.root
            and category.tenant != tenant
            and not self._is_fixed(category)
        ]
        least_used = min(candidates, key=lambda one: (one.use_count, _last_use(one)), default=None)
        if least_used is None or request_count <= least_used.use_count:
            return False
        self._forget_tree(least_used)
        return True

    def _forget_label(self, tenant: str | None) -> bool:
        candidates = [
            category
            for category in self._table.values()
            if category.tenant == tenant and not (category.child_count or self._is_fixed(category))
        ]
        if not candidates:
            return False
        self.forget(min(candidates, key=_last_use))
        return True

    def _forget_name(self, tenant: str | None) -> bool:
        oldest_name = min(
            (
                category
                for category in self._table.values()
                if category.parent is self.root
                and category.tenant == tenant
                and not self._is_fixed(category)
            ),
            key=_last_use,
        )
        self._forget_tree(oldest_name)
        return True

    def _forget_tree(self, name_category: Category) -> None:
        """Drop a name and all its refinements."""
        for category in reversed(list(self._table.values())):
            if category is name_category or category.label.startswith(f"{name_category.label}|"):
                self.forget(category)

    @staticmethod
    def _is_fixed(category: Category) -> bool:
        return category.label in (ROOT, OVERFLOW) or category.label.partition("|")[0] == SHARED


def _mark_used(category: Category | None, now: float | None) -> None:
    """Record a use of ``category`` and of all its parents."""
    if now is None:
        return
    while category is not None and (category.used_at is None or category.used_at < now):
        category.used_at = now
        category.use_count += 1
        category = category.parent


def _decrement(counts: Counter[str | None], tenant: str | None) -> None:
    counts[tenant] -= 1
    if not counts[tenant]:
        del counts[tenant]


def _last_use(category: Category) -> float:
    return -math.inf if category.used_at is None else category.used_at
