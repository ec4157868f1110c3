"""Choose the prefix subtrees that become groups.

Kareto (section 4.3, arXiv 2603.08739) takes the top K by reuse. A common prefix of all requests has
the most reuse but separates nothing, so here reuse only selects ``CANDIDATES``. Of these, groups
are chosen greedily by the gain of a TTL of their own over the TTL of the enclosing group.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from canopy_lab.group_ttl.allocate import budget_price, fixed_ttl_step
from canopy_lab.group_ttl.histogram import Curves, Histograms, count_intervals
from canopy_lab.group_ttl.paths import PathSegments

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

CANDIDATES = 1024
MIN_REUSES = 4
"""Minimum number of repeated requests of a group."""
_MAX_GROUP_SHARE = 0.5
"""Largest share of all requests that a group may have."""
_EARLY_SHARE = 0.02
"""Subtrees first used in this share of the window are assumed to be older than the window."""


@dataclass(frozen=True, slots=True)
class GroupSelection:
    """Options of ``choose_groups``."""

    max_groups: int = 64
    has_categories: bool = False
    """Give each category outside all groups its own TTL."""
    prior_requests: float | None = None
    """Prior of ``Histograms.expected_curves``; ``None`` counts the window exactly (hindsight)."""
    lag_s: float = 0.0
    """Age at which a table can list a subtree; earlier uses count for the residual group."""
    min_reuses: int = MIN_REUSES


@dataclass(frozen=True, slots=True)
class Groups:
    """Chosen roots, with histograms and curves for the allocator.

    Rows of ``curves``: the roots, then the categories; the first category is the residual group.
    """

    roots: tuple[int, ...]
    categories: tuple[str, ...]
    histograms: Histograms
    curves: Curves


def choose_groups(
    segments: PathSegments, budget_tokens: float, selection: GroupSelection
) -> Groups:
    """Choose subtrees to give TTLs of their own, on a disk of ``budget_tokens``."""
    candidates = np.zeros(0, dtype=np.int64)
    if selection.max_groups and len(segments):
        candidates = _candidates(segments, selection.min_reuses)
    roots = [int(r) for r in segments.first[candidates]]
    group_of = segments.deepest_roots(roots)
    parent = segments.parent[candidates]
    parent_group = np.where(parent >= 0, group_of[parent], -1)
    counts = _group_histograms(segments, group_of[segments.use_segment], len(roots))
    curves = _curves_of(counts, selection)
    chosen = _choose(curves, parent_group, selection.max_groups, budget_tokens)
    return group_curves(segments, tuple(roots[c] for c in chosen), selection)


def group_curves(
    segments: PathSegments, roots: tuple[int, ...], selection: GroupSelection
) -> Groups:
    """Return the histograms and curves of the given groups and the residual group."""
    count = len(roots)
    category_names = segments.categories if selection.has_categories else segments.categories[:1]
    group = segments.deepest_roots(roots)[segments.use_segment]
    use_s = segments.times_s[segments.use_request]
    category = np.zeros(len(group), dtype=np.int64)
    if selection.has_categories:
        category = segments.category[segments.use_request]
    is_listed = np.zeros(len(group), dtype=bool)
    if count:
        listed_from_s = _first_use_s(segments, roots) + selection.lag_s
        is_listed = (group >= 0) & (use_s >= listed_from_s[group])
    row = np.where(group >= 0, group, count + category)
    residual_row = count + category
    row_count = count + len(category_names)
    all_uses = _histograms(segments, row, row_count)
    if selection.prior_requests is None:
        return Groups(roots, category_names, all_uses, all_uses.exact_curves())
    # Uses before a subtree could be listed shape its group's curve, but count as residual volume.
    listed = _histograms(segments, np.where(is_listed | (group < 0), row, residual_row), row_count)
    expected = all_uses.expected_curves(selection.prior_requests)
    residual = listed.expected_curves(selection.prior_requests)
    share = listed.weight / np.maximum(all_uses.weight, 1)
    share[count:] = 0.0
    hits = expected.hits * share[:, None]
    mean_tokens = expected.mean_tokens * share[:, None]
    hits[count:], mean_tokens[count:] = residual.hits[count:], residual.mean_tokens[count:]
    # A group without listed volume gets a thousandth of its weight, so that it gets a TTL.
    tiny_share = np.where(share[:count] > 0, 0.0, 1e-3)[:, None]
    hits[:count] += expected.hits[:count] * tiny_share
    mean_tokens[:count] += expected.mean_tokens[:count] * tiny_share
    return Groups(roots, category_names, all_uses, Curves(hits, mean_tokens))


def _first_use_s(segments: PathSegments, roots: tuple[int, ...]) -> Floats:
    """Return each root's first use; ``-inf`` if it may predate the window."""
    segment_by_root = {int(block): s for s, block in enumerate(segments.first.tolist())}
    first_uses = np.searchsorted(segments.use_segment, [segment_by_root[root] for root in roots])
    first_s = segments.times_s[segments.use_request[first_uses]]
    early_end_s = segments.start_s + _EARLY_SHARE * (segments.end_s - segments.start_s)
    return np.where(first_s <= early_end_s, -np.inf, first_s)


def _group_histograms(segments: PathSegments, group: Ints, groups: int) -> Histograms:
    """Return histograms by the group (u,) of each use; group -1 is the last row."""
    return _histograms(segments, np.where(group < 0, groups, group), groups + 1)


def _histograms(segments: PathSegments, row: Ints, rows: int) -> Histograms:
    segment = segments.use_segment
    times = segments.times_s[segments.use_request]
    return count_intervals(
        row,
        segments.use_request,
        segments.gaps_s,
        segments.end_s - times,
        segments.tokens[segment],
        rows,
        segments.end_s - segments.start_s,
    )


def _curves_of(counts: Histograms, selection: GroupSelection) -> Curves:
    return (
        counts.exact_curves()
        if selection.prior_requests is None
        else counts.expected_curves(selection.prior_requests)
    )


def _candidates(segments: PathSegments, min_reuses: int) -> Ints:
    """Return the segments with the most reused tokens in their subtree; parents first."""
    segment = segments.use_segment
    size = len(segments)
    # Every request of a subtree uses its first segment.
    reused = segment[np.isfinite(segments.gaps_s)]
    reuses = np.bincount(reused, minlength=size)
    tokens = np.bincount(reused, weights=segments.tokens[reused], minlength=size)
    subtree_tokens = segments.subtree_sum(tokens)
    # A prefix of most requests separates nothing and would leave no residual group.
    separates = np.bincount(segment, minlength=size) <= _MAX_GROUP_SHARE * len(segments.times_s)
    eligible = np.flatnonzero((reuses >= min_reuses) & (subtree_tokens > 0) & separates)
    largest = eligible[np.argsort(-subtree_tokens[eligible], kind="stable")[:CANDIDATES]]
    return np.sort(largest)


def _choose(curves: Curves, parent: Ints, max_groups: int, budget_tokens: float) -> list[int]:
    """Choose greedily by the gain of an own TTL, at the price of a token on the disk."""
    count = len(parent)
    if not count:
        return []
    fixed_step = fixed_ttl_step(curves, budget_tokens)
    hits, mean_tokens = (c.sum(axis=0, keepdims=True) for c in (curves.hits, curves.mean_tokens))
    price = budget_price(Curves(hits, mean_tokens), budget_tokens)
    subtree_worth = (curves.hits - price * curves.mean_tokens)[:-1].copy()
    """Worth by TTL of each candidate's subtree, less the groups chosen inside it."""
    for c in range(count - 1, -1, -1):
        if parent[c] >= 0:
            subtree_worth[parent[c]] += subtree_worth[c]
    step = np.full(count, fixed_step)
    chosen: list[int] = []
    is_chosen = np.zeros(count, dtype=bool)
    rows = np.arange(count)
    for _ in range(max_groups):
        gain = np.where(is_chosen, 0.0, subtree_worth.max(axis=1) - subtree_worth[rows, step])
        winner = int(np.argmax(gain))
        if gain[winner] <= 0:
            break
        chosen.append(winner)
        is_chosen[winner] = True
        best_worth = subtree_worth[winner].copy()
        ttl_step = int(np.argmax(best_worth))
        for c in range(winner + 1, count):
            # Candidates inside this group now compare with its TTL, unless a closer group encloses
            # them.
            if not is_chosen[c] and parent[c] >= 0 and (parent[c] == winner or step[parent[c]] < 0):
                step[c] = -1
        step[step < 0] = ttl_step
        step[winner] = ttl_step
        enclosing = int(parent[winner])
        while enclosing >= 0:
            subtree_worth[enclosing] -= best_worth
            if is_chosen[enclosing]:
                break
            enclosing = int(parent[enclosing])
    return sorted(chosen)
