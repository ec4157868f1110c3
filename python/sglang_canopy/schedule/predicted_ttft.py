"""When a request that comes now will have its first token, and how far off such predictions were.

What is let in before it is what waits and goes first, and shorter requests that come meanwhile.
While it waits W seconds, those bring rho W of work, where rho is the load of the ones that are
shorter, so that W = before / (1 - rho); and never more than its budget lets past it. Costs are of
prefill alone; what decoding and the engine take beside is a line over it, learnt from what came.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

FADE_S = 60.0
"""After so many seconds an arrival counts 1 / e in the load."""
LEARNT_FROM = 256
"""Requests that the line is learnt from: the last ones."""
FEWEST = 8
MOST_LOAD = 0.99
EXAMPLE_TOKENS = (512, 4096, 32768)
"""To compute, of requests whose TTFT is always told, for a router."""
_SIZES = 64
"""Of costs, by powers of two: from microseconds to more than anything costs."""
_LEAST_S = 1e-6


@dataclass(slots=True, frozen=True)
class WorkBefore:
    """What a request finds in the queue, in seconds of prefill."""

    cost_s: float
    """Its own."""
    before_s: float
    """What would be let in before it if nobody came any more."""
    budget_s: float
    """Of younger work that may be let in before it."""


class PredictedTtft:
    """Of one queue. Times are the caller's clock, in seconds."""

    def __init__(self) -> None:
        self._work = [0.0] * _SIZES
        """Of arrivals by the power of two of their cost, faded."""
        self._faded_at = 0.0
        self._came: deque[tuple[float, float]] = deque(maxlen=LEARNT_FROM)
        """Seconds of prefill that were predicted, and what came."""
        self._line = (0.0, 1.0)
        """From the one to the other: a start and a slope."""
        self.requests = 0
        """That had their first token after a prediction."""
        self.predicted_s = self.came_s = self.error_s = 0.0
        """Summed over them; the last is of absolute errors."""

    def arrived(self, cost_s: float, now: float) -> None:
        """A request of such a cost came."""
        kept = math.exp(min(self._faded_at - now, 0.0) / FADE_S)
        self._work = [kept * work for work in self._work]
        self._faded_at = now
        self._work[_size(cost_s)] += cost_s

    def seconds(self, work: WorkBefore) -> float:
        """Until the first token of one that finds this."""
        start, slope = self._line
        return start + slope * self._prefill_s(work)

    def first_token(self, work: WorkBefore, predicted_s: float, came_s: float) -> None:
        """One for which ``predicted_s`` was said had its first token after ``came_s``."""
        self.requests += 1
        self.predicted_s += predicted_s
        self.came_s += came_s
        self.error_s += abs(predicted_s - came_s)
        self._came.append((self._prefill_s(work), came_s))
        if len(self._came) >= FEWEST:
            self._line = _fitted(*zip(*self._came, strict=True))

    def _prefill_s(self, work: WorkBefore) -> float:
        shorter_s = sum(self._work[: _size(work.cost_s)]) * self._line[1]
        load = min(shorter_s / FADE_S, MOST_LOAD)
        passed = min(work.before_s * load / (1.0 - load), work.budget_s)
        return work.before_s + passed + work.cost_s


def _fitted(prefill: Sequence[float], came: Sequence[float]) -> tuple[float, float]:
    """Least squares of a start and a slope, neither below 0."""
    count, sum_prefill, sum_came = len(came), sum(prefill), sum(came)
    square = sum(x * x for x in prefill) - sum_prefill**2 / count
    product = sum(x * y for x, y in zip(prefill, came, strict=True))
    slope = (product - sum_prefill * sum_came / count) / square if square > 0.0 else math.nan
    start = (sum_came - slope * sum_prefill) / count
    if slope < 0.0:
        return sum_came / count, 0.0
    return (start, slope) if start >= 0.0 else (0.0, sum_came / sum_prefill)


def _size(cost_s: float) -> int:
    return min(max(math.frexp(cost_s / _LEAST_S)[1], 0), _SIZES - 1)
