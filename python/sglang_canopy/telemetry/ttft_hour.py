"""Times to first token over the last hour, per minute, including the wait in the queue."""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable
from threading import Lock
from typing import Any

from sglang_canopy.telemetry.window import MINUTE_S, POINTS

_STEP = 1.1
"""Ratio of adjacent bins of times; the error is at most 5 %."""
_MIN_S = 1e-4
_CLASSES = 200
QUANTILES = {"p50_s": 0.5, "p99_s": 0.99}


class TtftHour:
    """Counts of times, by minute. Bounded for any input."""

    def __init__(self, clock: Callable[[], float]) -> None:
        """Create empty counts. ``clock`` returns seconds since 1970."""
        self._clock = clock
        self._points: deque[dict[str, Any]] = deque(maxlen=POINTS)
        self._counts: Counter[int] = Counter()
        self._minute = -math.inf
        self._lock = Lock()

    def add(self, seconds: float) -> None:
        """Add one request's time. Values that are negative or not finite are ignored."""
        if not math.isfinite(seconds) or seconds < 0:
            return
        at = int(math.log(max(seconds, _MIN_S) / _MIN_S, _STEP))
        with self._lock:
            self._turn()
            self._counts[min(at, _CLASSES)] += 1

    def points(self) -> list[dict[str, Any]]:
        """Return the points, oldest first, without empty minutes. The last may be incomplete."""
        with self._lock:
            self._turn()
            oldest = self._minute - (POINTS - 1) * MINUTE_S
            points = [*self._points, self._point()] if self._counts else list(self._points)
        return [point for point in points if point["time_unix_s"] >= oldest]

    def _turn(self) -> None:
        minute = self._clock() // MINUTE_S * MINUTE_S
        if minute != self._minute:
            if self._counts:
                self._points.append(self._point())
            self._minute, self._counts = minute, Counter()

    def _point(self) -> dict[str, Any]:
        number = self._counts.total()
        point: dict[str, Any] = {"time_unix_s": self._minute, "requests": number}
        for name, share in QUANTILES.items():
            rank, below = math.ceil(share * number), 0
            for at in sorted(self._counts):
                below += self._counts[at]
                if below >= rank:
                    point[name] = round(_MIN_S * _STEP ** (at + 0.5), 6)
                    break
        return point
