"""A clock in wall time that ignores jumps of the wall clock."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

TOLERANCE_S = 60.0
"""Greatest drift between wall and monotonic clock that counts as time synchronisation."""


class SteadyClock:
    """Seconds since the epoch without later jumps of the wall clock.

    The monotonic clock reveals a jump. Jumps are counted and subtracted from later results, so that
    pages neither expire at once (forward) nor live for ever (backward).
    """

    def __init__(
        self,
        wall: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self.jumps = 0
        self.skew_s = 0.0
        """Wall time minus this clock's."""
        self._wall = wall
        self._monotonic = monotonic
        self._lead = wall() - monotonic()
        self._lock = threading.Lock()

    def __call__(self) -> float:
        with self._lock:
            wall = self._wall()
            drift = wall - self._monotonic() - self._lead
            if abs(drift - self.skew_s) > TOLERANCE_S:
                self.jumps += 1
                self.skew_s = drift
            return wall - self.skew_s
