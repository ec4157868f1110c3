"""Predict the TTFT of an arriving request, and track the error of past predictions.

Work ahead is queued work admitted earlier, plus shorter requests that arrive during the wait. These
add rho W in a wait of W seconds, where rho is the load of shorter requests, so
W = before / (1 - rho), capped by the overtaking budget. Costs cover prefill only; decode and engine
overhead enter through a line fitted to observed TTFTs.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

FADE_S = 60.0
"""Time constant of the load estimate: an arrival this old counts 1/e."""
LEARNT_FROM = 256
"""Latest requests that the line is fitted to."""
MIN_OBSERVED = 8
MAX_LOAD = 0.99
EXAMPLE_TOKENS = (512, 4096, 32768)
"""Uncached prompt sizes whose predicted TTFT is always exported, for routers."""
_BUCKETS = 64
"""Cost buckets, one per power of two above 1 us."""
_MIN_COST_S = 1e-6


@dataclass(slots=True, frozen=True)
class WorkBefore:
    """Work ahead of a request on arrival, in seconds of prefill."""

    cost_s: float
    before_s: float
    """Queued work that is admitted earlier if no more requests arrive."""
    budget_s: float
    """Younger work that may still be admitted earlier."""


class ShorterLoad:
    """Estimate of the load of shorter requests. Times are seconds on the caller's clock."""

    def __init__(self) -> None:
        self._arrived_s = [0.0] * _BUCKETS
        """Arrived work per cost bucket, decayed."""
        self._decayed_at = 0.0

    def arrived(self, cost_s: float, now: float) -> None:
        """Count an arrival towards the load."""
        if now > self._decayed_at:
            decay = math.exp((self._decayed_at - now) / FADE_S)
            self._arrived_s = [decay * work for work in self._arrived_s]
            self._decayed_at = now
        self._arrived_s[_bucket(cost_s)] += cost_s

    def prefill_s(self, work: WorkBefore, slope: float = 1.0) -> float:
        """Return the prefill seconds until the end of a request's own prefill. ``slope``: seconds
        per second of cost."""
        shorter_s = sum(self._arrived_s[: _bucket(work.cost_s)]) * slope
        load = min(shorter_s / FADE_S, MAX_LOAD)
        passed = min(work.before_s * load / (1.0 - load), work.budget_s)
        return work.before_s + passed + work.cost_s


class PredictedTtft:
    """TTFT model of one queue. Times are seconds on the caller's clock."""

    def __init__(self) -> None:
        self._load = ShorterLoad()
        self._observed: deque[tuple[float, float]] = deque(maxlen=LEARNT_FROM)
        """Pairs of (predicted prefill seconds, observed TTFT)."""
        self._fit = (0.0, 1.0)
        """Intercept and slope from predicted prefill to TTFT."""
        self.requests = 0
        """Requests with both a prediction and a first token."""
        self.predicted_s = self.observed_s = self.error_s = 0.0
        """Sums over these requests; ``error_s`` sums absolute errors."""

    def arrived(self, cost_s: float, now: float) -> None:
        """Count an arrival towards the load."""
        self._load.arrived(cost_s, now)

    def seconds(self, work: WorkBefore) -> float:
        """Return the predicted TTFT, in seconds."""
        start, slope = self._fit
        return start + slope * self._prefill_s(work)

    def first_token(self, work: WorkBefore, predicted_s: float, observed_s: float) -> None:
        """Record the observed TTFT, ``observed_s``, of a request predicted at ``predicted_s``."""
        self.requests += 1
        self.predicted_s += predicted_s
        self.observed_s += observed_s
        self.error_s += abs(predicted_s - observed_s)
        self._observed.append((self._prefill_s(work), observed_s))
        if len(self._observed) >= MIN_OBSERVED:
            self._fit = _fit_line(*zip(*self._observed, strict=True))

    def _prefill_s(self, work: WorkBefore) -> float:
        return self._load.prefill_s(work, self._fit[1])


def _fit_line(prefill: Sequence[float], observed: Sequence[float]) -> tuple[float, float]:
    """Fit intercept and slope by least squares, both at least 0."""
    count, sum_prefill, sum_observed = len(observed), sum(prefill), sum(observed)
    square = sum(x * x for x in prefill) - sum_prefill**2 / count
    product = sum(x * y for x, y in zip(prefill, observed, strict=True))
    slope = (product - sum_prefill * sum_observed / count) / square if square > 0.0 else math.nan
    start = (sum_observed - slope * sum_prefill) / count
    if slope < 0.0:
        return sum_observed / count, 0.0
    return (start, slope) if start >= 0.0 else (0.0, sum_observed / sum_prefill)


def _bucket(cost_s: float) -> int:
    return min(max(math.frexp(cost_s / _MIN_COST_S)[1], 0), _BUCKETS - 1)
