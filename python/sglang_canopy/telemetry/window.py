"""Sums and times to first token over the last minutes and the last hour."""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Mapping
from threading import Lock
from typing import Any, NamedTuple

MINUTE_S = 60.0
POINT_S = 5.0
"""Seconds per point of the last minutes."""
MAX_POINTS = 60

_BIN_RATIO = 1.1
"""Ratio of adjacent bins of times; the error is at most 5 %."""
_MIN_TTFT_S = 1e-4
_MAX_BIN = 200
_QUANTILES = {"p50_s": 0.5, "p99_s": 0.99}

Sums = Mapping[str, Any]
"""Sums since the start, by name: numbers, or mappings of numbers."""


class _Reading(NamedTuple):
    now: float
    """Seconds on a monotonic clock."""
    unix_s: float
    sums: Sums


class Window:
    """Sums at the last ``MAX_POINTS`` points in time, ``point_s`` seconds apart."""

    def __init__(self, point_s: float) -> None:
        self._point_s = point_s
        self._readings: deque[_Reading] = deque(maxlen=MAX_POINTS + 1)
        self._points: deque[dict[str, Any]] = deque(maxlen=MAX_POINTS)
        """Differences between adjacent points of ``_readings``."""
        self._latest: _Reading | None = None

    def add(self, now: float, unix_s: float, sums: Sums) -> None:
        """Add ``sums``. ``now``: seconds on a monotonic clock; ``unix_s``: seconds since 1970."""
        self._latest = _Reading(now, unix_s, sums)
        if not self._readings or now - self._readings[-1].now >= self._point_s:
            if self._readings:
                self._points.append(_point(self._readings[-1], self._latest))
            self._readings.append(self._latest)

    def points(self) -> list[dict[str, Any]]:
        """Return the differences between adjacent points, oldest first, with ``time_unix_s``."""
        return list(self._points)

    def since_last_point(self) -> list[dict[str, Any]]:
        """Return the sums since the last complete point, as a list of at most one point."""
        return [] if self._latest is None else [_point(self._readings[-1], self._latest)]

    def over_last(self, seconds: float) -> dict[str, Any]:
        """Return the sums over the last ``seconds``, up to a point longer; fewer soon after the start."""
        assert self._latest is not None
        start_s = self._latest.now - seconds
        older = [reading for reading in self._readings if reading.now <= start_s]
        return _point(older[-1] if older else self._readings[0], self._latest)


def _point(earlier: _Reading, later: _Reading) -> dict[str, Any]:
    return {"time_unix_s": round(later.unix_s, 1), **_subtract(later.sums, earlier.sums)}


def _subtract(later: Any, earlier: Any) -> Any:
    if not isinstance(later, Mapping):
        return later - earlier
    earlier = earlier or {}
    return {key: _subtract(later[key], earlier.get(key, 0)) for key in later}


class TtftHour:
    """Quantiles of the times to first token of each minute of the last hour. Memory is bounded."""

    def __init__(self, clock: Callable[[], float]) -> None:
        """Create empty counts. ``clock`` returns seconds since 1970."""
        self._clock = clock
        self._points: deque[dict[str, Any]] = deque(maxlen=MAX_POINTS)
        self._counts: Counter[int] = Counter()
        self._minute_unix_s = -math.inf
        self._lock = Lock()

    def add(self, ttft_s: float) -> None:
        """Add one request's time. Values that are negative or not finite are ignored."""
        if not math.isfinite(ttft_s) or ttft_s < 0:
            return
        bin_number = int(math.log(max(ttft_s, _MIN_TTFT_S) / _MIN_TTFT_S, _BIN_RATIO))
        with self._lock:
            self._begin_minute()
            self._counts[min(bin_number, _MAX_BIN)] += 1

    def points(self) -> list[dict[str, Any]]:
        """Return the points, oldest first, without empty minutes. The last may be incomplete."""
        with self._lock:
            self._begin_minute()
            oldest_unix_s = self._minute_unix_s - (MAX_POINTS - 1) * MINUTE_S
            points = [*self._points, self._point()] if self._counts else list(self._points)
        return [point for point in points if point["time_unix_s"] >= oldest_unix_s]

    def _begin_minute(self) -> None:
        minute = self._clock() // MINUTE_S * MINUTE_S
        if minute != self._minute_unix_s:
            if self._counts:
                self._points.append(self._point())
            self._minute_unix_s, self._counts = minute, Counter()

    def _point(self) -> dict[str, Any]:
        request_count = self._counts.total()
        point: dict[str, Any] = {"time_unix_s": self._minute_unix_s, "requests": request_count}
        for name, share in _QUANTILES.items():
            rank, counted = math.ceil(share * request_count), 0
            for bin_number in sorted(self._counts):
                counted += self._counts[bin_number]
                if counted >= rank:
                    point[name] = round(_MIN_TTFT_S * _BIN_RATIO ** (bin_number + 0.5), 6)
                    break
        return point
