"""Laws of reuse times: the paper's exponential against ``wa``'s survival curve.

Each is fitted for every category on the first half of a trace's time, with the data up to its end, and
tested on the uses of the second half, as arXiv 2506.02634 fits an hour and applies it to
the next (Section 4.2, Figure 23; Figures 15 and 29).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from canopy_lab.characterize.observe import Observation
from canopy_lab.characterize.reuse_time import MAX_CATEGORIES, Ages, policy_bins, tally
from sglang_canopy.reuse.survival import BINS, EDGES, survival_curve

LEAN = 20.0
"""Blocks at risk that the curve of all categories counts for in one category's curve."""
MIN_REUSES = 200
"""Reuses of blocks that a category needs to be fitted."""
MIN_IN_A_HALF = 50
"""And that each half of the trace's time needs."""


@dataclass(frozen=True, slots=True)
class Fit:
    """Fit of a law from the first half of the trace's time to the reuse ages of the second half.

    Both are among the blocks that were used again. Blocks without a use at a half's end are censored
    (the exponential of the paper ignores them)."""

    ks: float
    """Kolmogorov-Smirnov distance: the largest gap between the two distribution functions, at
    the edges of the policies' age bins."""
    log_likelihood: float
    """Mean natural logarithm of the probability of an age's bin; higher is better."""


@dataclass(frozen=True, slots=True)
class Laws:
    """Fits of a category, or of all together (``all``)."""

    name: str
    reuses: int
    survival: Fit
    exponential: Fit


def laws(seen: Observation) -> list[Laws]:
    """Return all reuses first, then categories by decreasing number; omit categories with too few."""
    middle_s = float(seen.time_s[0]) + seen.span_s / 2.0
    whole = tally(seen, -np.inf, np.inf)
    train, test = tally(seen, -np.inf, middle_s), tally(seen, middle_s, np.inf)
    counts = whole.reuses.sum(1)
    coarser = train.of().curve
    fitted = [_laws("all", whole.of(), train.of(), test.of(), train.of().curve)]
    for c in np.argsort(-counts, kind="stable")[:MAX_CATEGORIES]:
        fitted.append(
            _laws(seen.category_name(int(c)), whole.of(c), train.of(c), test.of(c), coarser)
        )
    return [one for one in fitted if one is not None]


def _laws(name: str, whole: Ages, train: Ages, test: Ages, coarser: list[float]) -> Laws | None:
    """``coarser``: the curve that the survival fit leans on, as ``wa``'s does."""
    count = int(whole.reuses.sum())
    if count < MIN_REUSES or min(train.reuses.sum(), test.reuses.sum()) < MIN_IN_A_HALF:
        return None
    return Laws(
        name,
        count,
        _test(_survival_cdf(train, coarser), test),
        _test(_exponential_cdf(train), test),
    )


def _survival_cdf(train: Ages, coarser: list[float]) -> np.ndarray:
    """Return the distribution of reuse ages of reused blocks, at the upper edges of the policies' bins."""
    curve = survival_curve(
        policy_bins(train.reuses).tolist(),
        policy_bins(train.waiting).tolist(),
        prior=coarser,
        prior_weight=LEAN,
    )
    reused = 1.0 - np.array(curve[1:])
    # Normalise to the reused blocks, like the data; the rest lies beyond the last edge.
    return np.append(reused / (reused[-1] or 1.0), 1.0)


def _exponential_cdf(train: Ages) -> np.ndarray:
    """The same of the exponential with the mean of the reuses that were seen."""
    edges = np.append(EDGES[1:], np.inf)
    return -np.expm1(-edges / train.mean_s) if train.mean_s > 0 else np.ones(BINS)


def _test(cdf: np.ndarray, test: Ages) -> Fit:
    """Compare ``cdf`` with the uses after its fitting period."""
    reused = 1.0 - np.array(test.curve[1:])
    seen = np.append(reused / (reused[-1] or 1.0), 1.0)
    mass = np.maximum(np.diff(np.concatenate([[0.0], cdf])), 1e-9)
    share = np.diff(np.concatenate([[0.0], seen]))
    gap = np.abs(seen - cdf).max()
    loglik = (share * np.log(mass / mass.sum())).sum()
    return Fit(ks=float(gap), log_likelihood=float(loglik))
