"""Times to first token over the last hour, a point a minute: what clients waited, queue included."""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable
from threading import Lock
from typing import Any

from sglang_canopy.telemetry.hour import POINT_S, POINTS

_STEP = 1.1
"""Times are counted in classes, each so many times as long as the one before: 5 % off at most."""
_LEAST_S = 1e-4
_CLASSES = 200
QUANTILES = {"p50_s": 0.5, "p99_s": 0.99}


class TtftHour:
    """Counts of times, by minute. Bounded, whatever comes."""

    def __init__(self, clock: Callable[[], float]) -> None:
        """``clock``: seconds since 1970."""
        self._clock = clock
        self._points: deque[dict[str, Any]] = deque(maxlen=POINTS)
        self._counts: Counter[int] = Counter()
        self._minute = -math.inf
        self._lock = Lock()

    def add(self, seconds: float) -> None:
        """One request's. What is not finite or is negative is ignored."""
        if not math.isfinite(seconds) or seconds < 0:
            return
        at = int(math.log(max(seconds, _LEAST_S) / _LEAST_S, _STEP))
        with self._lock:
            self._turn()
            self._counts[min(at, _CLASSES)] += 1

    def points(self) -> list[dict[str, Any]]:
        """Oldest first; minutes without a request are left out. The last may be under way."""
        with self._lock:
            self._turn()
            oldest = self._minute - (POINTS - 1) * POINT_S
            points = [*self._points, self._point()] if self._counts else list(self._points)
        return [point for point in points if point["time"] >= oldest]

    def _turn(self) -> None:
        minute = self._clock() // POINT_S * POINT_S
        if minute != self._minute:
            if self._counts:
                self._points.append(self._point())
            self._minute, self._counts = minute, Counter()

    def _point(self) -> dict[str, Any]:
        number = self._counts.total()
        found: dict[str, Any] = {"time": self._minute, "requests": number}
        for name, share in QUANTILES.items():
            rank, below = math.ceil(share * number), 0
            for at in sorted(self._counts):
                below += self._counts[at]
                if below >= rank:
                    found[name] = round(_LEAST_S * _STEP ** (at + 0.5), 6)
                    break
        return found
