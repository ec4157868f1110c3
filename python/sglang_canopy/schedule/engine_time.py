"""What time it is in a scheduler, from what all of its ranks know.

Clocks differ by rank, and the requests' own clock stands still between two arrivals: ranked by it,
whoever came last has waited for nothing until somebody else comes. So the time goes on by what each
step was predicted to take, and arrivals correct it both ways.
"""

from __future__ import annotations

import statistics
from collections import deque

DECODE_STEPS = 64
"""Decode steps whose median is what one takes: the last ones."""


class EngineTime:
    """Seconds on the requests' clock; each call is made at the same place on every rank.

    With steps that take what was predicted it is exact while the engine works. Wrong predictions
    are undone with the next arrival, up to the step in which it came.
    """

    __slots__ = ("_before", "_stamp", "now")

    def __init__(self) -> None:
        self.now = 0.0
        self._before = 0.0
        """``now`` before the last step."""
        self._stamp = 0.0
        """Of the latest arrival."""

    def worked(self, seconds: float) -> None:
        """A step ended that was predicted to take so long."""
        self._before = self.now
        self.now += seconds

    def arrived(self, stamp: float) -> None:
        """A request that was stamped so is here. It was not when the last step began."""
        if stamp <= self._stamp:  # late, or back in the queue: says nothing of the time
            return
        self._stamp = stamp
        ahead = self._before - stamp
        if ahead > 0.0:
            self._before = stamp
            self.now -= ahead
        self.now = max(self.now, stamp)


class DecodeStep:
    """What a decode step takes. ``seconds`` changes in ``adopt`` alone: ranks use those of one."""

    __slots__ = ("_last", "seconds")

    def __init__(self) -> None:
        self.seconds = 0.0
        self._last: deque[float] = deque(maxlen=DECODE_STEPS)

    def add(self, seconds: float) -> None:
        """A step was computed."""
        self._last.append(seconds)

    def fitted(self) -> float:
        """The median of the last ones; ``seconds`` before there are any."""
        return statistics.median(self._last) if self._last else self.seconds

    def adopt(self, seconds: float) -> None:
        """Use this from now on."""
        self.seconds = seconds
