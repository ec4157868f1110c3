"""Choose the prefix subtrees that become groups.

Kareto (section 4.3, arXiv 2603.08739) takes the top K by reuse. A common prefix of all requests has
the most reuse but separates nothing, so here reuse only selects ``CANDIDATES``. Of these, groups
are chosen greedily by the gain of a TTL of their own over the TTL of the enclosing group.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from canopy_lab.group_ttl.allocate import fixed_step, price_of
from canopy_lab.group_ttl.histogram import Curves, Histograms, histograms
from canopy_lab.group_ttl.paths import PathSegments

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

CANDIDATES = 1024
MIN_REUSES = 4
"""Minimum number of repeated requests of a group."""
_EVERYTHING = 0.5
"""Largest share of all requests that a group may have."""
_EARLY = 0.02
"""Subtrees first used in this share of the window are assumed to be older than the window."""


@dataclass(frozen=True, slots=True)
class GroupSelection:
    """Options of ``choose_groups``."""

    groups: int = 64
    categories: bool = False
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
    if selection.groups and len(segments):
        candidates = _candidates(segments, selection.min_reuses)
    roots = [int(r) for r in segments.first[candidates]]
    group_of = segments.deepest_roots(roots)
    parent = segments.parent[candidates]
    parent_group = np.where(parent >= 0, group_of[parent], -1)
    counts = _group_histograms(segments, group_of[segments.use_segment], len(roots))
    chosen = _choose(_curves_of(counts, selection), parent_group, selection.groups, budget_tokens)
    return group_curves(segments, tuple(roots[c] for c in chosen), selection)


def group_curves(
    segments: PathSegments, roots: tuple[int, ...], selection: GroupSelection
) -> Groups:
    """Return the histograms and curves of the given groups and the residual group."""
    count = len(roots)
    names = segments.categories if selection.categories else segments.categories[:1]
    group = segments.deepest_roots(roots)[segments.use_segment]
    use_s = segments.times_s[segments.use_request]
    category = np.zeros(len(group), dtype=np.int64)
    if selection.categories:
        category = segments.category[segments.use_request]
    is_listed = np.zeros(len(group), dtype=bool)
    if count:
        listed_from_s = _first_use_s(segments, roots) + selection.lag_s
        is_listed = (group >= 0) & (use_s >= listed_from_s[group])
    row = np.where(group >= 0, group, count + category)
    residual_row = count + category
    size = count + len(names)
    all_uses = _histograms(segments, row, size)
    if selection.prior_requests is None:
        return Groups(roots, names, all_uses, all_uses.exact())
    # Uses before a subtree could be listed shape its group's curve, but count as residual volume.
    volume = _histograms(segments, np.where(is_listed | (group < 0), row, residual_row), size)
    expected = all_uses.expected_curves(selection.prior_requests)
    residual = volume.expected_curves(selection.prior_requests)
    share = volume.weight / np.maximum(all_uses.weight, 1)
    share[count:] = 0.0
    hits = expected.hits * share[:, None]
    mean = expected.mean_tokens * share[:, None]
    hits[count:], mean[count:] = residual.hits[count:], residual.mean_tokens[count:]
    # A group without listed volume gets a thousandth of its weight, so that it gets a TTL.
    tiny = np.where(share[:count] > 0, 0.0, 1e-3)[:, None]
    hits[:count] += expected.hits[:count] * tiny
    mean[:count] += expected.mean_tokens[:count] * tiny
    return Groups(roots, names, all_uses, Curves(hits, mean))


def _first_use_s(segments: PathSegments, roots: tuple[int, ...]) -> Floats:
    """Return each root's first use; ``-inf`` if it may predate the window."""
    place = {int(block): s for s, block in enumerate(segments.first.tolist())}
    begins = np.searchsorted(segments.use_segment, [place[root] for root in roots])
    first = segments.times_s[segments.use_request[begins]]
    early = segments.start_s + _EARLY * (segments.end_s - segments.start_s)
    return np.where(first <= early, -np.inf, first)


def _group_histograms(segments: PathSegments, group: Ints, groups: int) -> Histograms:
    """Return histograms by the group (u,) of each use; group -1 is the last row."""
    return _histograms(segments, np.where(group < 0, groups, group), groups + 1)


def _histograms(segments: PathSegments, row: Ints, rows: int) -> Histograms:
    segment = segments.use_segment
    times = segments.times_s[segments.use_request]
    return histograms(
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
        counts.exact()
        if selection.prior_requests is None
        else counts.expected_curves(selection.prior_requests)
    )


def _candidates(segments: PathSegments, min_reuses: int) -> Ints:
    """Return the segments with the most reused tokens in their subtree; parents first."""
    reused = np.isfinite(segments.gaps_s)
    segment = segments.use_segment
    size = len(segments)
    # Every request of a subtree uses its first segment.
    reuses = np.bincount(segment[reused], minlength=size)
    tokens = np.bincount(segment[reused], weights=segments.tokens[segment[reused]], minlength=size)
    subtree_tokens = segments.subtree_sum(tokens)
    # A prefix of most requests separates nothing and would leave no residual group.
    separates = np.bincount(segment, minlength=size) <= _EVERYTHING * len(segments.times_s)
    eligible = np.flatnonzero((reuses >= min_reuses) & (subtree_tokens > 0) & separates)
    largest = eligible[np.argsort(-subtree_tokens[eligible], kind="stable")[:CANDIDATES]]
    return np.sort(largest)


def _choose(curves: Curves, parent: Ints, groups: int, budget_tokens: float) -> list[int]:
    """Choose greedily by the gain of an own TTL, at the price of a token on the disk."""
    count = len(parent)
    if not count:
        return []
    fixed = fixed_step(curves, budget_tokens)
    hits, mean_tokens = (c.sum(axis=0, keepdims=True) for c in (curves.hits, curves.mean_tokens))
    price = price_of(Curves(hits, mean_tokens), budget_tokens)
    subtree_worth = (curves.hits - price * curves.mean_tokens)[:-1].copy()
    """Worth by TTL of each candidate's subtree, less the groups chosen inside it."""
    for c in range(count - 1, -1, -1):
        if parent[c] >= 0:
            subtree_worth[parent[c]] += subtree_worth[c]
    step = np.full(count, fixed)
    chosen: list[int] = []
    is_chosen = np.zeros(count, dtype=bool)
    rows = np.arange(count)
    for _ in range(groups):
        gain = np.where(is_chosen, 0.0, subtree_worth.max(axis=1) - subtree_worth[rows, step])
        winner = int(np.argmax(gain))
        if gain[winner] <= 0:
            break
        chosen.append(winner)
        is_chosen[winner] = True
        best_worth = subtree_worth[winner].copy()
        ttl = int(np.argmax(best_worth))
        for c in range(winner + 1, count):
            # Candidates inside this group now compare with its TTL, unless a closer group encloses
            # them.
            if not is_chosen[c] and parent[c] >= 0 and (parent[c] == winner or step[parent[c]] < 0):
                step[c] = -1
        step[step < 0] = ttl
        step[winner] = ttl
        outer = int(parent[winner])
        while outer >= 0:
            subtree_worth[outer] -= best_worth
            if is_chosen[outer]:
                break
            outer = int(parent[outer])
    return sorted(chosen)
