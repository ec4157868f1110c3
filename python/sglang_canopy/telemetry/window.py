"""Differences of monotonic sums over time: the last minutes, and the last hour."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any

MINUTE_S = 60.0
POINT_S = 5.0
"""Seconds per point of the last minutes."""
POINTS = 60

Sums = Mapping[str, Any]
"""Sums since the start, by name: numbers, or mappings of numbers."""


class Window:
    """Sums at the last ``POINTS`` points in time, ``point_s`` seconds apart."""

    def __init__(self, point_s: float) -> None:
        self._point_s = point_s
        self._taken: deque[tuple[float, float, Sums]] = deque(maxlen=POINTS + 1)
        self._points: deque[dict[str, Any]] = deque(maxlen=POINTS)
        """Differences between adjacent points of ``_taken``."""
        self._now: tuple[float, float, Sums] | None = None

    def add(self, now: float, epoch: float, sums: Sums) -> None:
        """Add ``sums``. ``now``: seconds on a monotonic clock; ``epoch``: seconds since 1970."""
        self._now = (now, epoch, sums)
        if not self._taken or now - self._taken[-1][0] >= self._point_s:
            if self._taken:
                self._points.append(_point(self._taken[-1], self._now))
            self._taken.append(self._now)

    def points(self) -> list[dict[str, Any]]:
        """Return the differences between adjacent points, oldest first, with ``time_unix_s``."""
        return list(self._points)

    def running(self) -> list[dict[str, Any]]:
        """Return the difference from the last point; empty without sums."""
        return [] if self._now is None else [_point(self._taken[-1], self._now)]

    def last(self, seconds: float) -> dict[str, Any]:
        """Return the difference over the last ``seconds``, or up to one point longer."""
        assert self._now is not None
        due = self._now[0] - seconds
        before = [one for one in self._taken if one[0] <= due]
        return _point(before[-1] if before else self._taken[0], self._now)


def _point(old: tuple[float, float, Sums], new: tuple[float, float, Sums]) -> dict[str, Any]:
    return {"time_unix_s": round(new[1], 1), **_more(new[2], old[2])}


def _more(new: Any, old: Any) -> Any:
    if not isinstance(new, Mapping):
        return new - old
    old = old or {}
    return {key: _more(new[key], old.get(key, 0)) for key in new}
