"""The last hour, one point per minute: tokens requested, hit and evicted."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

POINT_S = 60.0
POINTS = 60

Sums = tuple[int, dict[str, int], dict[str, int]]
"""Since the start: prompt tokens, hits by tier, tokens evicted from the device by reason."""


@dataclass(slots=True)
class Hour:
    """Differences of monotonic sums."""

    _points: deque[dict[str, Any]] = field(default_factory=lambda: deque(maxlen=POINTS))
    _last: tuple[float, Sums] | None = None
    _now: tuple[float, Sums] | None = None
    _epoch: float = 0.0

    def add(self, now: float, epoch: float, sums: Sums) -> None:
        """Add ``sums``. ``now``: seconds on a monotonic clock; ``epoch``: seconds since 1970."""
        self._now, self._epoch = (now, sums), epoch
        if self._last is None:
            self._last = self._now
        elif now - self._last[0] >= POINT_S:
            self._points.append(self._point())
            self._last = self._now

    def points(self) -> list[dict[str, Any]]:
        """Return the points, oldest first; the last point covers the current minute."""
        return [*self._points, self._point()] if self._now is not None else []

    def _point(self) -> dict[str, Any]:
        assert self._now is not None
        assert self._last is not None
        (_, (prompts, hits, gone)), (_, (before, hits_before, gone_before)) = self._now, self._last
        return {
            "time_unix_s": round(self._epoch, 1),
            "prompt_tokens": prompts - before,
            "hit_tokens": _more(hits, hits_before),
            "evicted_tokens": _more(gone, gone_before),
        }


def _more(now: Mapping[str, int], before: Mapping[str, int]) -> dict[str, int]:
    return {key: count - before.get(key, 0) for key, count in now.items()}
