"""A TTL table for what comes next, from a window of what came.

A plan that is best in hindsight fits noise: the groups it cut out will not be the best of the
next hour. So curves are expected ones, of few requests shrunk to those of all; the residual
group's TTL is learnt from what new subtrees did before they could have been listed; and a table
is only used where it would have won: the window is cut in two, each kind of table is made from
the first part and tried on the second, and one that does not beat a single TTL there at the
same bytes is not used.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from canopy_lab.group_ttl.allocate import Allocation, allocate, check_budget, fixed_step
from canopy_lab.group_ttl.groups import Groups, GroupSelection, choose_groups
from canopy_lab.group_ttl.histogram import GRID_S
from canopy_lab.group_ttl.path_log import PathSnapshot
from canopy_lab.group_ttl.path_segments import segments_of
from canopy_lab.group_ttl.replay import TTLOutcome, fixed_ttls, simulate_ttl
from sglang_canopy.errors import CanopyError
from sglang_canopy.ttl.table import SERVER_HASH, Group, TTLTable

FIXED, GROUPS, CATEGORIES, BOTH = "fixed", "groups", "categories", "both"


@dataclass(frozen=True, slots=True)
class Learning:
    """How a table is learnt. Raises ``CanopyError`` for a value out of range."""

    groups: int = 64
    kinds: tuple[str, ...] = (GROUPS, CATEGORIES, BOTH)
    """Kinds of tables that may win against a single TTL."""
    prior_requests: float = 64.0
    """Requests' worth of the common curve that each group's own leans on."""
    refresh_s: float = 600.0
    """How long a table will be in force."""
    held_out: float = 1 / 3
    """The last part of the window that tables are tried on; 0 uses the first kind untried."""
    margin: float = 0.001
    """Hit ratio by which a table must win there."""
    like_ttl_s: float | None = None
    """Spend what this single TTL would, window by window, instead of a budget of bytes: the
    disk then grows and shrinks with the load, as it does under one TTL."""
    min_requests: int = 8
    """Requests that came back to a subtree, below which it is no group."""

    def __post_init__(self) -> None:
        for kind in self.kinds:
            if kind not in (GROUPS, CATEGORIES, BOTH):
                raise CanopyError(f"a table is of {GROUPS}, {CATEGORIES} or {BOTH}, got {kind!r}")
        for name, low, high in (
            ("prior_requests", 0, 1e6),
            ("refresh_s", 1e-3, math.inf),
            ("held_out", 0, 0.9),
            ("margin", -1, 1),
            ("min_requests", 1, 1e6),
            ("like_ttl_s", 1e-3, math.inf),
        ):
            value = getattr(self, name)
            if value is not None and not low <= value <= high:
                raise CanopyError(f"{name} must be from {low:g} to {high:g}, got {value}")


@dataclass(frozen=True, slots=True)
class GroupSummary:
    """One group of a table, for people."""

    root: int | None
    """``None``: outside all roots."""
    category: str | None
    ttl_s: float
    requests: int
    """That used it, in the window."""
    hits: float
    """Tokens that are expected to be hit in as long a time as the window's."""
    mean_tokens: float
    """Expected on the disk."""


@dataclass(frozen=True, slots=True)
class Learnt:
    """A table, and what it was chosen by."""

    table: TTLTable
    kind: str
    gains: dict[str, float]
    """Hit ratio won over a single TTL at the same bytes, on the part held out, by kind."""
    hits: float = 0.0
    """Tokens that are expected to be hit in as long a time as the window's."""
    mean_tokens: float = 0.0
    """Expected on the disk."""
    rows: tuple[GroupSummary, ...] = ()
    """Its groups, then its categories, the first of which stands for all others too."""


def learn(
    log: PathSnapshot,
    budget_tokens: float | None,
    learning: Learning | None = None,
    hash: str = SERVER_HASH,
) -> Learnt:
    """The table for what follows ``log``, for a mean of ``budget_tokens`` on the disk; ``None``
    with ``learning.like_ttl_s``, which overrides it.

    Without requests everything is kept for good, or for ``like_ttl_s``: there is nothing to go
    by. Raises ``CanopyError`` for a budget that is not positive.
    """
    learning = learning or Learning()
    if learning.like_ttl_s is None:
        check_budget(math.nan if budget_tokens is None else budget_tokens)
    if not len(log) or log.end_s <= log.start_s:
        ttl_s = math.inf if learning.like_ttl_s is None else learning.like_ttl_s
        return Learnt(TTLTable((), ttl_s, log.block_tokens, hash), FIXED, {})
    tried = learning.held_out > 0
    gains = _gains(log, budget_tokens, learning, hash) if tried else {}
    kind, most = FIXED, learning.margin
    for name in learning.kinds if gains or not tried else ():
        if gains.get(name, math.inf) > most:
            kind, most = name, gains.get(name, math.inf)
    return replace(_fit(log, budget_tokens, kind, learning, hash), gains=gains)


def in_hindsight(
    log: PathSnapshot,
    budget_tokens: float,
    groups: int = 64,
    hash: str = SERVER_HASH,
) -> Learnt:
    """The best table found for ``log`` itself: a bound for what groups can win, not a plan."""
    check_budget(budget_tokens)
    found = choose_groups(segments_of(log), budget_tokens, GroupSelection(groups))
    allocation = allocate(found.curves, budget_tokens)
    return _learnt(found, allocation, "hindsight", log.block_tokens, hash)


def at_equal_bytes(outcome: TTLOutcome, fixed: list[TTLOutcome]) -> float:
    """Hit ratio that a single TTL has with as many bytes as ``outcome``, interpolated."""
    order = sorted(fixed, key=lambda f: f.mean_tokens)
    return float(
        np.interp(
            outcome.mean_tokens,
            [f.mean_tokens for f in order],
            [f.hit_ratio for f in order],
        )
    )


def _gains(
    log: PathSnapshot, budget_tokens: float | None, learning: Learning, hash: str
) -> dict[str, float]:
    cut_s = log.end_s - learning.held_out * (log.end_s - log.start_s)
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
    log: PathSnapshot, budget_tokens: float | None, kind: str, learning: Learning, hash: str
) -> Learnt:
    segments = segments_of(log)
    selection = GroupSelection(
        groups=learning.groups if kind in (GROUPS, BOTH) else 0,
        categories=kind in (CATEGORIES, BOTH),
        prior_requests=learning.prior_requests,
        lag_s=learning.refresh_s,
        min_reuses=learning.min_requests,
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
        one = Allocation(np.array([step]), hits, mean, FIXED, {})
        learnt = _learnt(all_in_one, one, kind, log.block_tokens, hash)
        if learning.like_ttl_s is None:
            return learnt
        return replace(learnt, table=replace(learnt.table, residual_ttl_s=learning.like_ttl_s))
    found = choose_groups(segments, budget, selection)
    return _learnt(found, allocate(found.curves, budget), kind, log.block_tokens, hash)


def _learnt(
    found: Groups, allocation: Allocation, kind: str, block_tokens: int, hash: str
) -> Learnt:
    count = len(found.roots)
    ttls = allocation.ttl_s.tolist()
    several = len(found.categories) > 1
    table = TTLTable(
        tuple(Group(root, ttl_s) for root, ttl_s in zip(found.roots, ttls)),
        ttls[count],
        block_tokens,
        hash,
        dict(zip(found.categories, ttls[count:])) if several else {},
    )
    at = (np.arange(len(ttls)), allocation.steps)
    rows = zip(
        (*found.roots, *[None] * len(found.categories)),
        (*[None] * count, *(found.categories if several else [None])),
        ttls,
        found.histograms.requests.tolist(),
        found.curves.hits[at].tolist(),
        found.curves.mean_tokens[at].tolist(),
    )
    return Learnt(
        table,
        kind,
        {},
        allocation.hits,
        allocation.mean_tokens,
        tuple(GroupSummary(*r) for r in rows),
    )
