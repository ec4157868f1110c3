"""The last hour, a point a minute: what was asked for, hit and evicted."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

POINT_S = 60.0
POINTS = 60

Sums = tuple[int, dict[str, int], dict[str, int]]
"""Prompt tokens, hits by tier, tokens evicted from the device by reason; since the start."""


@dataclass(slots=True)
class Hour:
    """Differences of sums that only grow."""

    _points: deque[dict[str, Any]] = field(default_factory=lambda: deque(maxlen=POINTS))
    _last: tuple[float, Sums] | None = None
    _now: tuple[float, Sums] | None = None
    _epoch: float = 0.0

    def add(self, now: float, epoch: float, sums: Sums) -> None:
        """``now``: seconds on a clock that never goes back; ``epoch``: since 1970."""
        self._now, self._epoch = (now, sums), epoch
        if self._last is None:
            self._last = self._now
        elif now - self._last[0] >= POINT_S:
            self._points.append(self._point())
            self._last = self._now

    def points(self) -> list[dict[str, Any]]:
        """Oldest first; the last one is of the minute that is not over."""
        return [*self._points, self._point()] if self._now is not None else []

    def _point(self) -> dict[str, Any]:
        assert self._now is not None
        assert self._last is not None
        (_, (prompts, hits, gone)), (_, (before, hits_before, gone_before)) = self._now, self._last
        return {
            "time": round(self._epoch, 1),
            "prompt_tokens": prompts - before,
            "hit_tokens": _more(hits, hits_before),
            "evicted_tokens": _more(gone, gone_before),
        }


def _more(now: Mapping[str, int], before: Mapping[str, int]) -> dict[str, int]:
    return {key: count - before.get(key, 0) for key, count in now.items()}
