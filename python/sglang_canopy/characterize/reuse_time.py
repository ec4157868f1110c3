"""When blocks are used again, and which law predicts it (Section 3.4, Figures 12 to 15).

Two laws are fitted for every category (request type and turn of the request that used the block
last): the exponential of the paper, and the Kaplan-Meier survival curve that ``wa`` ranks by.
Each is fitted on one half of the requests and tested on the other, both ways round.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from sglang_canopy.characterize.observe import FINE_BINS, FINE_EDGES, Observation, edges_within
from sglang_canopy.reuse.bins import BINS, EDGES
from sglang_canopy.reuse.survival import survival_curve

MOST_CATEGORIES = 8
LEAN = 20.0
"""Blocks at risk that the curve of all categories counts for in one category's curve."""
LEAST_REUSES = 200
"""Reuses of blocks that a category needs to be fitted."""

_POLICY_BIN = np.minimum(np.searchsorted(EDGES, FINE_EDGES, "right") - 1, BINS - 1)
_UPPER = np.concatenate([FINE_EDGES[1:], [np.inf]])


@dataclass(frozen=True, slots=True)
class Fit:
    """How well a law fitted on one half of the requests describes the reuse ages of the other.

    Both among the blocks that were used again."""

    ks: float
    """Kolmogorov-Smirnov distance: the largest gap between the two distribution functions, at
    the edges of the policies' age bins."""
    log_likelihood: float
    """Mean natural logarithm of the probability of an age's bin; higher is better."""


@dataclass(frozen=True, slots=True)
class ReuseTime:
    """One category, or all of them together. Ages in seconds since the last use."""

    name: str
    reuses: int
    """Reuses of blocks that this category used last."""
    waiting: int
    """Blocks it used last that nothing used again: censored, not "never"."""
    p50_s: float
    p80_s: float
    p90_s: float
    """Of the reuses that happened."""
    mean_s: float
    """The exponential fit."""
    reused_by_end: float
    """Kaplan-Meier estimate of the share ever used again, within the trace's length."""
    age_s: tuple[float, ...]
    observed: tuple[float, ...]
    """Share of blocks used again by ``age_s``, waiting ones counted as waiting (fine bins)."""
    survival: tuple[float, ...]
    """The same as the survival curve of ``wa`` has it (its own bins)."""
    exponential: tuple[float, ...]
    """The same as the paper's exponential has it, scaled to ``reused_by_end``."""
    survival_fit: Fit | None
    exponential_fit: Fit | None
    """``None`` with fewer than ``LEAST_REUSES`` reuses."""


@dataclass(frozen=True, slots=True)
class ReuseTimes:
    """All reuses, and those of the categories with most of them."""

    all: ReuseTime
    within: tuple[tuple[float, float], ...]
    """(seconds, share of all reuses within them)."""
    categories: tuple[ReuseTime, ...]
    best: str
    """The law with the higher log-likelihood over the fitted categories, or ``"neither"``."""


def reuse_times(seen: Observation) -> ReuseTimes:
    """Answer from the observation."""
    waiting_by = _waiting(seen)
    total = _category(
        seen, "all", seen.reuse_count.sum(1), seen.reuse_sum_s.sum(1), waiting_by.sum(1)
    )
    coarser = np.array(
        survival_curve(
            _policy_bins(seen.reuse_count.sum((0, 1))).tolist(),
            _policy_bins(waiting_by.sum((0, 1))).tolist(),
        )
    )
    counts = seen.reuse_count.sum((0, 2))
    rows = [
        _category(
            seen,
            seen.category_name(int(c)),
            seen.reuse_count[:, c],
            seen.reuse_sum_s[:, c],
            waiting_by[:, c],
            coarser,
        )
        for c in np.argsort(-counts, kind="stable")[:MOST_CATEGORIES]
        if counts[c] > 0
    ]
    merged = seen.reuse_count.sum((0, 1))
    below = np.cumsum(merged) / max(merged.sum(), 1)
    marks = (1.0, 10.0, 60.0, 600.0, 3600.0)
    within = tuple((m, float(np.interp(m, _UPPER[:-1], below[:-1]))) for m in marks)
    fitted = [r for r in rows if r.survival_fit and r.exponential_fit]
    weight = sum(r.reuses for r in fitted)
    best = "neither"
    if weight:
        gain = sum(
            r.reuses * (r.survival_fit.log_likelihood - r.exponential_fit.log_likelihood)
            for r in fitted
            if r.survival_fit and r.exponential_fit
        )
        best = "survival" if gain > 0 else "exponential"
    return ReuseTimes(all=total, within=within, categories=tuple(rows), best=best)


def _waiting(seen: Observation) -> np.ndarray:
    """[half, category, age bin] of the blocks that wait at the end of the trace."""
    ages = float(seen.time_s[-1]) - seen.last_s
    bins = np.searchsorted(FINE_EDGES, ages, "right") - 1
    cells = seen.reuse_count.shape[1]
    half = seen.last_request & 1
    key = (half * cells + seen.category[seen.last_request]) * FINE_BINS + bins
    return np.bincount(key, minlength=2 * cells * FINE_BINS).reshape(2, cells, FINE_BINS)


def _category(
    seen: Observation,
    name: str,
    count: np.ndarray,
    sum_s: np.ndarray,
    waiting: np.ndarray,
    coarser: np.ndarray | None = None,
) -> ReuseTime:
    """``count`` and ``waiting`` are [half, age bin], ``sum_s`` is [half]."""
    reuses, held = count.sum(0), waiting.sum(0)
    n = int(reuses.sum())
    mean = float(sum_s.sum()) / n if n else 0.0
    observed = _kaplan_meier(reuses, held)
    events, censored = _policy_bins(reuses), _policy_bins(held)
    curve = np.array(survival_curve(events.tolist(), censored.tolist()))
    by_end = float(observed[-1])
    shape = -np.expm1(-FINE_EDGES / mean) if mean > 0 else (FINE_EDGES >= 0).astype(float)
    p50, p80, p90 = (_quantile(reuses, q) for q in (0.5, 0.8, 0.9))
    fits: tuple[Fit | None, Fit | None] = (None, None)
    if n >= LEAST_REUSES and (count.sum(1) > 0).all():
        fits = (
            _cross(count, waiting, sum_s, curve if coarser is None else coarser),
            _cross(count, waiting, sum_s, None),
        )
    keep = slice(edges_within(seen.span_s))
    return ReuseTime(
        name=name,
        reuses=n,
        waiting=int(held.sum()),
        p50_s=p50,
        p80_s=p80,
        p90_s=p90,
        mean_s=mean,
        reused_by_end=by_end,
        age_s=tuple(FINE_EDGES[keep].tolist()),
        observed=tuple(observed[keep].tolist()),
        survival=tuple(np.interp(FINE_EDGES[keep], EDGES, 1.0 - curve).tolist()),
        exponential=tuple((by_end * shape[keep]).tolist()),
        survival_fit=fits[0],
        exponential_fit=fits[1],
    )


def _kaplan_meier(events: np.ndarray, censored: np.ndarray) -> np.ndarray:
    """Share used again by each fine edge; actuarial, like ``reuse.survival``."""
    leaving = events + censored
    at_risk = leaving.sum() - np.concatenate([[0], np.cumsum(leaving)[:-1]])
    exposed = at_risk - 0.5 * censored
    hazard = np.divide(events, exposed, out=np.zeros(len(events)), where=exposed > 0)
    return 1.0 - np.concatenate([[1.0], np.cumprod(1.0 - np.minimum(hazard, 1.0))[:-1]])


def _policy_bins(fine: np.ndarray) -> np.ndarray:
    return np.bincount(_POLICY_BIN, fine, BINS)


def _quantile(counts: np.ndarray, q: float) -> float:
    """Interpolated inside its bin, geometrically where that can be."""
    total = counts.sum()
    if not total:
        return 0.0
    below = np.cumsum(counts)
    i = int(np.searchsorted(below, q * total))
    low, high = FINE_EDGES[i], _UPPER[i]
    if not np.isfinite(high):
        return float(low)
    inside = (q * total - (below[i] - counts[i])) / counts[i]
    if low <= 0:
        return float(high * inside)
    return float(low * (high / low) ** inside)


def _cross(
    count: np.ndarray, waiting: np.ndarray, sum_s: np.ndarray, coarser: np.ndarray | None
) -> Fit:
    """The mean of the two tests, each on the half that the fit has not seen.

    ``coarser`` is the curve of all categories, which the survival fit leans on as ``wa`` does;
    ``None`` fits the exponential.
    """
    edges = np.append(EDGES[1:], np.inf)
    scores = []
    for train, test in ((0, 1), (1, 0)):
        if coarser is None:
            mean = sum_s[train] / count[train].sum()
            cdf = -np.expm1(-edges / mean) if mean > 0 else np.ones(BINS)
        else:
            events = _policy_bins(count[train])
            curve = survival_curve(
                events.tolist(),
                _policy_bins(waiting[train]).tolist(),
                prior=coarser.tolist(),
                prior_weight=LEAN,
            )
            reused = 1.0 - np.array(curve[1:])
            # Among the reused, like the data; beyond the last edge lies the rest.
            cdf = np.append(reused / (reused[-1] or 1.0), 1.0)
        mass = np.maximum(np.diff(np.concatenate([[0.0], cdf])), 1e-9)
        share = _policy_bins(count[test]) / count[test].sum()
        gap = np.abs(np.cumsum(share) - cdf).max()
        scores.append((gap, float((share * np.log(mass / mass.sum())).sum())))
    ks, loglik = np.mean(scores, axis=0)
    return Fit(ks=float(ks), log_likelihood=float(loglik))
