"""Upper bound of an arriving request's TTFT that holds with a stated probability.

Split conformal prediction (Vovk et al. 2005; Lei et al. 2018) on the ratio of the observed TTFT to
the predicted prefill ahead: the bound is the prediction times the ceil((n + 1) q)-th smallest of the
latest n ratios. Short waits have larger ratios than long ones, since decode steps and fixed costs are
not in the prediction, so there is one window per power of two of the prediction (Mondrian
conformal prediction). Drift weakens the guarantee; the windows are short for that reason.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence

from sglang_canopy.schedule.predicted_ttft import ShorterLoad, WorkBefore

QUANTILE = 0.9
RATIOS = 64
"""Latest ratios per window."""
MIN_RATIOS = 12
"""Ratios needed for a bound; the quantile of fewer is infinite at 0.9."""
WINDOWS = 24
_FIRST = -9
"""Exponent of the first window: predictions up to 2**-9 s."""


class TtftBound:
    """Bounds for one queue. Only ``adopt`` and ``load`` change them, so ranks that adopt the same
    factors, and receive the same arrivals, agree. ``seconds`` is the bound of a prediction."""

    def __init__(self, quantile: float = QUANTILE) -> None:
        self.quantile = quantile
        self.load = ShorterLoad()
        self._ratios = [deque[float](maxlen=RATIOS) for _ in range(WINDOWS)]
        self._factors = [0.0] * WINDOWS
        """Factor of each window; 0 without enough ratios."""
        self.requests = self.covered = 0
        """Requests with a bound and a first token; among them, requests within the bound."""

    def predicted_s(self, work: WorkBefore) -> float:
        """Return the seconds until the end of a request's own prefill."""
        return self.load.prefill_s(work)

    def seconds(self, predicted_s: float) -> float:
        """Return the bound, in seconds. A window without a factor uses the next below, then the next
        above; without any factor the bound is the prediction."""
        window = _window(predicted_s)
        for factor in (*self._factors[window::-1], *self._factors[window + 1 :]):
            if factor > 0.0:
                return factor * predicted_s
        return predicted_s

    def observed(self, predicted_s: float, bound_s: float, ttft_s: float) -> None:
        """Record the TTFT of a request that was admitted with this prediction and bound."""
        if bound_s > predicted_s:
            self.requests += 1
            self.covered += ttft_s <= bound_s
        self._ratios[_window(predicted_s)].append(ttft_s / predicted_s)

    def measured(self) -> list[float]:
        """Return the factors of the latest ratios, one per window, at least 0."""
        return [_quantile(ratios, self.quantile) for ratios in self._ratios]

    def adopt(self, factors: Sequence[float]) -> None:
        self._factors = list(factors)


def _window(predicted_s: float) -> int:
    return min(max(math.frexp(predicted_s)[1] - _FIRST, 0), WINDOWS - 1)


def _quantile(ratios: Sequence[float], quantile: float) -> float:
    if len(ratios) < MIN_RATIOS:
        return 0.0
    place = math.ceil((len(ratios) + 1) * quantile)
    return sorted(ratios)[min(place, len(ratios)) - 1]
