"""Time until blocks are used again (Section 3.4, Figures 12 to 15).

Compares the observed times with the paper's exponential and with the Kaplan-Meier survival curve
that ``wa`` ranks by.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from canopy_lab.characterize.observe import (
    FINE_BINS,
    FINE_EDGES,
    TOP_TURN,
    Observation,
    edges_within,
)
from sglang_canopy.reuse.survival import AGE_BINS, AGE_EDGES_S, survival_curve

MAX_REUSE_CATEGORIES = 8

_POLICY_BIN_OF_FINE = np.searchsorted(AGE_EDGES_S, FINE_EDGES, "right") - 1
_UPPER_EDGES = np.concatenate([FINE_EDGES[1:], [np.inf]])


@dataclass(frozen=True, slots=True)
class ReuseTime:
    """One category, or all together. Ages in seconds since the last use."""

    name: str
    reuses: int
    """Reuses of blocks that this category used last."""
    waiting: int
    """Its last-used blocks without a later use: censored, not "never"."""
    p50_s: float
    p80_s: float
    p90_s: float
    """Quantiles of the reuses that happened."""
    mean_s: float
    """Mean of the exponential fit."""
    reused_by_end: float
    """Kaplan-Meier estimate of the share ever reused, within the trace's length."""
    age_s: tuple[float, ...]
    observed: tuple[float, ...]
    """Share of blocks reused by ``age_s``; waiting blocks censored (fine bins)."""
    survival: tuple[float, ...]
    """The same share from the survival curve of ``wa`` (its own bins)."""
    exponential: tuple[float, ...]
    """The same share from the paper's exponential, scaled to ``reused_by_end``."""


@dataclass(frozen=True, slots=True)
class ReuseTimes:
    """All reuses, and the categories with most reuses."""

    all: ReuseTime
    within: tuple[tuple[float, float], ...]
    """(seconds, share of all reuses within them)."""
    categories: tuple[ReuseTime, ...]


def measure_reuse_times(observation: Observation) -> ReuseTimes:
    tally = _count_ages(observation)
    counts = tally.reuses.sum(1)
    rows = [
        _make_row(observation, observation.category_name(int(category)), tally.ages_of(category))
        for category in np.argsort(-counts, kind="stable")[:MAX_REUSE_CATEGORIES]
        if counts[category] > 0
    ]
    reuses_by_age = tally.reuses.sum(0)
    cumulative = np.cumsum(reuses_by_age) / max(reuses_by_age.sum(), 1)
    marks_s = (1.0, 10.0, 60.0, 600.0, 3600.0)
    within = tuple((s, float(np.interp(s, _UPPER_EDGES[:-1], cumulative[:-1]))) for s in marks_s)
    all_reuses = _make_row(observation, "all", tally.ages_of())
    return ReuseTimes(all=all_reuses, within=within, categories=tuple(rows))


@dataclass(frozen=True, slots=True)
class Ages:
    """One category, or all: reuses and waiting blocks, by fine age bin."""

    reuses: np.ndarray
    waiting: np.ndarray
    sum_s: float
    """Sum of the ages of the reuses."""

    @property
    def mean_s(self) -> float:
        reuse_count = int(self.reuses.sum())
        return self.sum_s / reuse_count if reuse_count else 0.0

    @property
    def curve(self) -> list[float]:
        """Survival curve on the policies' bins."""
        return survival_curve(
            _policy_bins(self.reuses).tolist(), _policy_bins(self.waiting).tolist()
        )


@dataclass(frozen=True, slots=True)
class _Tally:
    """Ages of all categories: [category, age bin], [category, age bin], [category]."""

    reuses: np.ndarray
    waiting: np.ndarray
    sum_s: np.ndarray

    def ages_of(self, category: int | None = None) -> Ages:
        if category is None:
            return Ages(self.reuses.sum(0), self.waiting.sum(0), float(self.sum_s.sum()))
        return Ages(self.reuses[category], self.waiting[category], float(self.sum_s[category]))


def _count_ages(observation: Observation) -> _Tally:
    """Count reuses, and the blocks that wait at the trace's end."""
    categories, category = len(observation.labels) * TOP_TURN, observation.category

    def count(requests: np.ndarray, age_s: np.ndarray, blocks: np.ndarray | None) -> np.ndarray:
        bins = np.searchsorted(FINE_EDGES, age_s, "right") - 1
        cells = category[requests] * FINE_BINS + bins
        return np.bincount(cells, blocks, categories * FINE_BINS).reshape(categories, FINE_BINS)

    age_s, blocks = observation.reuse_age_s, observation.reused_blocks
    return _Tally(
        count(observation.reused_from, age_s, blocks),
        count(observation.last_request, float(observation.time_s[-1]) - observation.last_s, None),
        np.bincount(category[observation.reused_from], age_s * blocks, categories),
    )


def _make_row(observation: Observation, name: str, ages: Ages) -> ReuseTime:
    reuses, waiting, mean_s = ages.reuses, ages.waiting, ages.mean_s
    observed = _kaplan_meier(reuses, waiting)
    reused_by_end = float(observed[-1])
    exponential = -np.expm1(-FINE_EDGES / mean_s) if mean_s > 0 else (FINE_EDGES >= 0).astype(float)
    p50, p80, p90 = (_quantile(reuses, q) for q in (0.5, 0.8, 0.9))
    shown = slice(edges_within(observation.span_s))
    edges_s = FINE_EDGES[shown]
    return ReuseTime(
        name=name,
        reuses=int(reuses.sum()),
        waiting=int(waiting.sum()),
        p50_s=p50,
        p80_s=p80,
        p90_s=p90,
        mean_s=mean_s,
        reused_by_end=reused_by_end,
        age_s=tuple(edges_s.tolist()),
        observed=tuple(observed[shown].tolist()),
        survival=tuple(np.interp(edges_s, AGE_EDGES_S, 1.0 - np.array(ages.curve)).tolist()),
        exponential=tuple((reused_by_end * exponential[shown]).tolist()),
    )


def _kaplan_meier(events: np.ndarray, censored: np.ndarray) -> np.ndarray:
    """Return the share used again by each fine edge; actuarial, like ``reuse.survival``."""
    leaving = events + censored
    at_risk = leaving.sum() - np.concatenate([[0], np.cumsum(leaving)[:-1]])
    exposed = at_risk - 0.5 * censored
    hazard = np.divide(events, exposed, out=np.zeros(len(events)), where=exposed > 0)
    return 1.0 - np.concatenate([[1.0], np.cumprod(1.0 - np.minimum(hazard, 1.0))[:-1]])


def _policy_bins(fine: np.ndarray) -> np.ndarray:
    """Sum fine counts into the policies' age bins."""
    return np.bincount(_POLICY_BIN_OF_FINE, fine, AGE_BINS)


def _quantile(counts: np.ndarray, q: float) -> float:
    """Return a quantile, interpolated inside its bin (geometrically if the bin allows)."""
    total = counts.sum()
    if not total:
        return 0.0
    cumulative = np.cumsum(counts)
    i = int(np.searchsorted(cumulative, q * total))
    low, high = FINE_EDGES[i], _UPPER_EDGES[i]
    if not np.isfinite(high):
        return float(low)
    fraction = (q * total - (cumulative[i] - counts[i])) / counts[i]
    if low <= 0:
        return float(high * fraction)
    return float(low * (high / low) ** fraction)
