"""Prompt tokens and hits of the last minutes, from monotonic sums."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

WINDOW_S = 60.0
"""Seconds of the "last minute"."""
POINT_S = 5.0
"""Seconds per point of the history."""
POINTS = 60


@dataclass(slots=True)
class History:
    """Prompt tokens and hits over time, from monotonic sums. Times are in seconds, on any clock."""

    points: deque[tuple[int, int]] = field(default_factory=lambda: deque(maxlen=POINTS))
    """Per ``POINT_S``: prompt tokens, and their hits on any tier."""
    _recent: deque[tuple[float, tuple[int, ...]]] = field(default_factory=deque)
    _last: tuple[float, tuple[int, ...]] | None = None

    def add(self, now: float, sums: tuple[int, ...]) -> None:
        """Add ``sums`` since the start: prompt tokens, then the tokens hit in each tier."""
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
        """Return ``sums`` over the last ``WINDOW_S``."""
        return _difference(self._recent[0][1], self._recent[-1][1])


def _difference(old: tuple[int, ...], new: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(b - a for a, b in zip(old, new))
