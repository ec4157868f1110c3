"""Stopping rule of a trial: paired differences, an interval, and a few looks at it.

A pair is two slices of time, one under each policy, in random order, so that a trend in the traffic
favours neither. The interval of the mean difference is Student's. It is examined ``len(LOOKS)``
times, at ``LEVEL / len(LOOKS)`` each, so that all looks together call two equal policies different
at most once in ``1 / LEVEL`` trials (Bonferroni). ``benchmark/whatif/trial.py`` measures that with
a placebo.
"""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

LOOKS = (6, 8, 11, 15, 20, 27)
"""Numbers of pairs after which a trial may end (last: must)."""
LEVEL = 0.05
WORTH_POINTS = 0.5
"""A difference that is surely smaller counts as equal."""
BETTER, WORSE, SAME, UNSURE = "better", "worse", "same", "unsure"
IDLE = "idle"
"""Nothing was evicted, so that no policy could differ."""


@dataclass(frozen=True, slots=True)
class Standing:
    """Result of the pairs so far, in points (hundredths) of the prompts' prefill seconds."""

    pairs: int
    points: float
    low: float
    high: float
    verdict: str | None
    """``None``: the trial continues."""


def standing(differences: Sequence[float]) -> Standing:
    """Return the standing after two or more pairs. ``differences``: points of each pair."""
    pairs = len(differences)
    mean = statistics.fmean(differences)
    half = _quantile(pairs - 1) * statistics.stdev(differences) / math.sqrt(pairs)
    verdict = _verdict(mean - half, mean + half, pairs) if pairs in LOOKS else None
    return Standing(pairs, mean, mean - half, mean + half, verdict)


@functools.cache
def _quantile(freedom: int) -> float:
    from scipy.stats import t

    return float(t.ppf(1 - LEVEL / len(LOOKS) / 2, freedom))


def _verdict(low: float, high: float, pairs: int) -> str | None:
    if low > -WORTH_POINTS and high < WORTH_POINTS:
        return SAME
    if low > 0:
        return BETTER
    if high < 0:
        return WORSE
    return UNSURE if pairs == LOOKS[-1] else None
