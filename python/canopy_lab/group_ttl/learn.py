"""Learn a TTL table for future traffic from a window of past traffic.

The best table in hindsight overfits: its groups are not the best of the next hour. Therefore curves
are expected values, shrunk to the pooled curve; the residual group's TTL is learnt from new subtrees
before they could have been listed; and the window is split, each kind of table is fitted on the
first part and used only if it beats a single TTL at the same bytes on the second.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from canopy_lab.group_ttl.allocate import Allocation, allocate, check_budget, fixed_ttl_step
from canopy_lab.group_ttl.groups import Groups, GroupSelection, choose_groups
from canopy_lab.group_ttl.histogram import GRID_S
from canopy_lab.group_ttl.paths import Paths, segments_of
from canopy_lab.group_ttl.replay import TTLOutcome, fixed_ttls, simulate_ttl
from sglang_canopy.ttl.table import SERVER_HASH, Group, TTLTable

FIXED, GROUPS, CATEGORIES, BOTH = "fixed", "groups", "categories", "both"
PRIOR_REQUESTS = 64.0
"""Weight of the pooled curve in each group's curve, in requests."""
HELD_OUT_SHARE, MIN_GAIN = 1 / 3, 0.001
"""Share of the window, at its end, used for the comparison, and the required gain in hit ratio."""
MAX_GROUPS = 64
"""Groups of a table at most."""
MIN_REQUESTS = 8
"""Minimum number of repeated requests of a group."""


@dataclass(frozen=True, slots=True)
class LearningOptions:
    """Options of ``learn``."""

    kinds: tuple[str, ...] = (GROUPS, CATEGORIES, BOTH)
    """Kinds of tables to compare with a single TTL."""
    refresh_s: float = 600.0
    """Seconds for which a table applies."""
    reference_ttl_s: float | None = None
    """If set, the budget is the mean disk content under this single TTL in each window."""


@dataclass(frozen=True, slots=True)
class GroupSummary:
    """One group of a table, for display."""

    root: int | None
    """``None``: the residual group."""
    category: str | None
    ttl_s: float
    requests: int
    """Requests in the window that used the group."""
    hits: float
    """Expected hit tokens per window duration."""
    mean_tokens: float
    """Expected tokens on the disk."""


@dataclass(frozen=True, slots=True)
class LearntTable:
    """A table and the evidence for it."""

    table: TTLTable
    kind: str
    gains: dict[str, float]
    """Held-out gain in hit ratio over a single TTL at the same bytes, by kind."""
    hits: float = 0.0
    """Expected hit tokens per window duration."""
    mean_tokens: float = 0.0
    """Expected tokens on the disk."""
    rows: tuple[GroupSummary, ...] = ()
    """Groups, then categories; the first category includes unlisted ones."""


def learn(
    paths: Paths,
    budget_tokens: float | None,
    learning: LearningOptions | None = None,
    hash: str = SERVER_HASH,
) -> LearntTable:
    """Return a table for the traffic after ``paths``, with ``budget_tokens`` on the disk on average.

    ``learning.reference_ttl_s`` overrides the budget, which may then be ``None``. Without a span of
    time the TTL is infinite, or ``reference_ttl_s``. Raises ``CanopyError`` for a budget of 0 or less.
    """
    learning = learning or LearningOptions()
    if learning.reference_ttl_s is None:
        check_budget(math.nan if budget_tokens is None else budget_tokens)
    if paths.end_s <= paths.start_s:
        ttl_s = math.inf if learning.reference_ttl_s is None else learning.reference_ttl_s
        return LearntTable(TTLTable((), ttl_s, paths.block_tokens, hash), FIXED, {})
    gains = _held_out_gains(paths, budget_tokens, learning, hash)
    kind, largest_gain = FIXED, MIN_GAIN
    for name, gain in gains.items():
        if gain > largest_gain:
            kind, largest_gain = name, gain
    return replace(_fit_table(paths, budget_tokens, kind, learning, hash), gains=gains)


def equal_bytes_hit_ratio(outcome: TTLOutcome, fixed: list[TTLOutcome]) -> float:
    """Return the interpolated hit ratio of a single TTL that uses as many bytes as ``outcome``."""
    order = sorted(fixed, key=lambda o: o.mean_tokens)
    return float(
        np.interp(outcome.mean_tokens, [o.mean_tokens for o in order], [o.hit_ratio for o in order])
    )


def _held_out_gains(
    paths: Paths, budget_tokens: float | None, learning: LearningOptions, hash: str
) -> dict[str, float]:
    cut_s = paths.end_s - HELD_OUT_SHARE * (paths.end_s - paths.start_s)
    before = paths.until(cut_s)
    if not len(before) or before.end_s <= before.start_s or len(before) == len(paths):
        return {}
    fixed = fixed_ttls(segments_of(paths), GRID_S, cut_s)
    table_before = _fit_table(before, budget_tokens, FIXED, learning, hash).table
    gains = {}
    for kind in learning.kinds:
        table = _fit_table(before, budget_tokens, kind, learning, hash).table
        outcome = simulate_ttl(paths, [(paths.start_s, table_before), (cut_s, table)], cut_s)
        gains[kind] = outcome.hit_ratio - equal_bytes_hit_ratio(outcome, fixed)
    return gains


def _fit_table(
    paths: Paths, budget_tokens: float | None, kind: str, learning: LearningOptions, hash: str
) -> LearntTable:
    segments = segments_of(paths)
    selection = GroupSelection(
        max_groups=MAX_GROUPS if kind in (GROUPS, BOTH) else 0,
        has_categories=kind in (CATEGORIES, BOTH),
        prior_requests=PRIOR_REQUESTS,
        lag_s=learning.refresh_s,
        min_reuses=MIN_REQUESTS,
    )
    one_group = choose_groups(segments, 1.0, replace(selection, max_groups=0, has_categories=False))
    curves = one_group.curves
    if learning.reference_ttl_s is None:
        assert budget_tokens is not None
        step, budget = fixed_ttl_step(curves, budget_tokens), budget_tokens
    else:
        step = int(np.searchsorted(GRID_S, learning.reference_ttl_s, side="right")) - 1
        budget = max(float(curves.mean_tokens[0, step]), 1e-9)
    if kind == FIXED:
        hits, mean_tokens = float(curves.hits[0, step]), float(curves.mean_tokens[0, step])
        single = Allocation(np.array([step]), hits, mean_tokens)
        learnt = learnt_table(one_group, single, kind, paths.block_tokens, hash)
        if learning.reference_ttl_s is None:
            return learnt
        return replace(learnt, table=replace(learnt.table, residual_ttl_s=learning.reference_ttl_s))
    chosen = choose_groups(segments, budget, selection)
    return learnt_table(chosen, allocate(chosen.curves, budget), kind, paths.block_tokens, hash)


def learnt_table(
    groups: Groups, allocation: Allocation, kind: str, block_tokens: int, hash: str
) -> LearntTable:
    """Return the table of an allocation, without gains."""
    root_count = len(groups.roots)
    ttls = allocation.ttl_s.tolist()
    has_categories = len(groups.categories) > 1
    table = TTLTable(
        tuple(Group(root, ttl_s) for root, ttl_s in zip(groups.roots, ttls)),
        ttls[root_count],
        block_tokens,
        hash,
        dict(zip(groups.categories, ttls[root_count:])) if has_categories else {},
    )
    chosen_cells = (np.arange(len(ttls)), allocation.steps)
    rows = zip(
        (*groups.roots, *[None] * len(groups.categories)),
        (*[None] * root_count, *(groups.categories if has_categories else [None])),
        ttls,
        groups.histograms.requests.tolist(),
        groups.curves.hits[chosen_cells].tolist(),
        groups.curves.mean_tokens[chosen_cells].tolist(),
    )
    return LearntTable(
        table,
        kind,
        {},
        allocation.hits,
        allocation.mean_tokens,
        tuple(GroupSummary(*row) for row in rows),
    )
