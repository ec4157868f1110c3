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

from canopy_lab.group_ttl.allocate import Allocation, allocate, check_budget, fixed_step
from canopy_lab.group_ttl.groups import Groups, GroupSelection, choose_groups
from canopy_lab.group_ttl.histogram import GRID_S
from canopy_lab.group_ttl.paths import Paths, segments_of
from canopy_lab.group_ttl.replay import TTLOutcome, fixed_ttls, simulate_ttl
from sglang_canopy.ttl.table import SERVER_HASH, Group, TTLTable

FIXED, GROUPS, CATEGORIES, BOTH = "fixed", "groups", "categories", "both"
PRIOR_REQUESTS = 64.0
"""Weight of the pooled curve in each group's curve, in requests."""
HELD_OUT, MARGIN = 1 / 3, 0.001
"""Share of the window, at its end, used for the comparison, and the required gain in hit ratio."""
MAX_LEARNT = 64
"""Groups of a table at most."""
MIN_REQUESTS = 8
"""Minimum number of repeated requests of a group."""


@dataclass(frozen=True, slots=True)
class Learning:
    """Options of ``learn``."""

    kinds: tuple[str, ...] = (GROUPS, CATEGORIES, BOTH)
    """Kinds of tables to compare with a single TTL."""
    refresh_s: float = 600.0
    """Seconds for which a table applies."""
    like_ttl_s: float | None = None
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
class Learnt:
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
    log: Paths,
    budget_tokens: float | None,
    learning: Learning | None = None,
    hash: str = SERVER_HASH,
) -> Learnt:
    """Return a table for the traffic after ``log``, with ``budget_tokens`` on the disk on average.

    ``learning.like_ttl_s`` overrides the budget, which may then be ``None``. Without a span of
    time the TTL is infinite, or ``like_ttl_s``. Raises ``CanopyError`` for a budget that is not positive.
    """
    learning = learning or Learning()
    if learning.like_ttl_s is None:
        check_budget(math.nan if budget_tokens is None else budget_tokens)
    if log.end_s <= log.start_s:
        ttl_s = math.inf if learning.like_ttl_s is None else learning.like_ttl_s
        return Learnt(TTLTable((), ttl_s, log.block_tokens, hash), FIXED, {})
    gains = _gains(log, budget_tokens, learning, hash)
    kind, most = FIXED, MARGIN
    for name, gain in gains.items():
        if gain > most:
            kind, most = name, gain
    return replace(_fit(log, budget_tokens, kind, learning, hash), gains=gains)


def at_equal_bytes(outcome: TTLOutcome, fixed: list[TTLOutcome]) -> float:
    """Return the interpolated hit ratio of a single TTL that uses as many bytes as ``outcome``."""
    order = sorted(fixed, key=lambda f: f.mean_tokens)
    return float(
        np.interp(outcome.mean_tokens, [f.mean_tokens for f in order], [f.hit_ratio for f in order])
    )


def _gains(
    log: Paths, budget_tokens: float | None, learning: Learning, hash: str
) -> dict[str, float]:
    cut_s = log.end_s - HELD_OUT * (log.end_s - log.start_s)
    before = log.until(cut_s)
    if not len(before) or before.end_s <= before.start_s or len(before) == len(log):
        return {}
    fixed = fixed_ttls(segments_of(log), GRID_S, cut_s)
    past = _fit(before, budget_tokens, FIXED, learning, hash).table
    gains = {}
    for kind in learning.kinds:
        table = _fit(before, budget_tokens, kind, learning, hash).table
        won = simulate_ttl(log, [(log.start_s, past), (cut_s, table)], cut_s)
        gains[kind] = won.hit_ratio - at_equal_bytes(won, fixed)
    return gains


def _fit(
    log: Paths, budget_tokens: float | None, kind: str, learning: Learning, hash: str
) -> Learnt:
    segments = segments_of(log)
    selection = GroupSelection(
        groups=MAX_LEARNT if kind in (GROUPS, BOTH) else 0,
        categories=kind in (CATEGORIES, BOTH),
        prior_requests=PRIOR_REQUESTS,
        lag_s=learning.refresh_s,
        min_reuses=MIN_REQUESTS,
    )
    all_in_one = choose_groups(segments, 1.0, replace(selection, groups=0, categories=False))
    curves = all_in_one.curves
    if learning.like_ttl_s is None:
        assert budget_tokens is not None
        step, budget = fixed_step(curves, budget_tokens), budget_tokens
    else:
        step = int(np.searchsorted(GRID_S, learning.like_ttl_s, side="right")) - 1
        budget = max(float(curves.mean_tokens[0, step]), 1e-9)
    if kind == FIXED:
        hits, mean = float(curves.hits[0, step]), float(curves.mean_tokens[0, step])
        one = Allocation(np.array([step]), hits, mean)
        learnt = learnt_table(all_in_one, one, kind, log.block_tokens, hash)
        if learning.like_ttl_s is None:
            return learnt
        return replace(learnt, table=replace(learnt.table, residual_ttl_s=learning.like_ttl_s))
    chosen = choose_groups(segments, budget, selection)
    return learnt_table(chosen, allocate(chosen.curves, budget), kind, log.block_tokens, hash)


def learnt_table(
    groups: Groups, allocation: Allocation, kind: str, block_tokens: int, hash: str
) -> Learnt:
    """Return the table of an allocation, without gains."""
    count = len(groups.roots)
    ttls = allocation.ttl_s.tolist()
    several = len(groups.categories) > 1
    table = TTLTable(
        tuple(Group(root, ttl_s) for root, ttl_s in zip(groups.roots, ttls)),
        ttls[count],
        block_tokens,
        hash,
        dict(zip(groups.categories, ttls[count:])) if several else {},
    )
    chosen_cells = (np.arange(len(ttls)), allocation.steps)
    rows = zip(
        (*groups.roots, *[None] * len(groups.categories)),
        (*[None] * count, *(groups.categories if several else [None])),
        ttls,
        groups.histograms.requests.tolist(),
        groups.curves.hits[chosen_cells].tolist(),
        groups.curves.mean_tokens[chosen_cells].tolist(),
    )
    return Learnt(
        table,
        kind,
        {},
        allocation.hits,
        allocation.mean_tokens,
        tuple(GroupSummary(*r) for r in rows),
    )
