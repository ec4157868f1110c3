"""Prompt tokens and hits of the last minutes, from sums that only grow."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

WINDOW_S = 60.0
"""The "last minute"."""
POINT_S = 5.0
"""Seconds that one point of the history stands for."""
POINTS = 60


@dataclass(slots=True)
class History:
    """Prompt tokens and hits over time, from sums that only grow. Times in seconds, any clock."""

    points: deque[tuple[int, int]] = field(default_factory=lambda: deque(maxlen=POINTS))
    """For every ``POINT_S``: prompt tokens, and how many of them any tier had."""
    _recent: deque[tuple[float, tuple[int, ...]]] = field(default_factory=deque)
    _last: tuple[float, tuple[int, ...]] | None = None

    def add(self, now: float, sums: tuple[int, ...]) -> None:
        """``sums``: prompt tokens, then the tokens hit in each tier, since the start."""
        self._recent.append((now, sums))
        while len(self._recent) > 2 and self._recent[1][0] <= now - WINDOW_S:
            self._recent.popleft()
        if self._last is None:
            self._last = (now, sums)
        elif now - self._last[0] >= POINT_S:
            prompts, *hits = _difference(self._last[1], sums)
            self.points.append((prompts, sum(hits)))
            self._last = (now, sums)

    def last_minute(self) -> tuple[int, ...]:
        """``sums`` over the last ``WINDOW_S``."""
        return _difference(self._recent[0][1], self._recent[-1][1])


def _difference(old: tuple[int, ...], new: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(b - a for a, b in zip(old, new))
