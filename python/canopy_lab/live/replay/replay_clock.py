"""Stamp requests of an accelerated replay with the trace's time.

Policies learn the pauses of conversations. A replay of two hours in two minutes shortens these pauses, and
a slow machine lengthens them. A server started with ``--canopy-enable-forced-output`` therefore accepts
the arrival time from the request: ``custom_params["canopy_replay_clock"] = [run, seconds]``, the trace's
time in that run. This changes only the stamp for policies; arrival, waiting and service remain real.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

from sglang_canopy.errors import CanopyError

KEY = "canopy_replay_clock"
"""Key of ``custom_params`` with the value ``[run, seconds]``, both 0 or more."""

_RUNS = 4
_LONGEST_S = 1e9


def check(custom_params: Any) -> tuple[int, float] | None:
    """Return the run and its time in seconds, or ``None``. Raises ``CanopyError`` (status 400)."""
    if not isinstance(custom_params, Mapping) or KEY not in custom_params:
        return None
    value = custom_params[KEY]
    if (
        isinstance(value, list)
        and len(value) == 2
        and type(value[0]) is int
        and type(value[1]) in (int, float)
        and value[0] >= 0
        and 0 <= value[1] <= _LONGEST_S
    ):
        return value[0], float(value[1])
    raise CanopyError(
        f"custom_params key {KEY!r} must be [run, seconds], a whole number and a number, 0 or more"
    )


class ReplayClock:
    """Map the time of each run to the interval after all earlier stamps."""

    def __init__(self) -> None:
        self._begin_s: OrderedDict[int, float] = OrderedDict()
        self._last_s = 0.0

    def stamp(self, run: int, seconds: float, now_s: float) -> float:
        """Return the stamp of a request of ``run`` that arrives at ``now_s`` on the server's clock.

        A new run starts at or after the last stamp of earlier runs: time never decreases.
        """
        if run not in self._begin_s:
            self._begin_s[run] = max(now_s, self._last_s) - seconds
            while len(self._begin_s) > _RUNS:
                self._begin_s.popitem(last=False)
        stamped = self._begin_s[run] + seconds
        self._last_s = max(self._last_s, stamped)
        return stamped


clock = ReplayClock()
"""Replay clock of this process."""
