"""Stamp requests with the trace's own time in a faster replay.

Policies learn how long conversations pause. A replay that squeezes two hours into two minutes
shows them other pauses than the trace had, and a slow machine stretches them again. A server
started with ``--canopy-enable-forced-output`` therefore also takes the arrival time from the
request: ``custom_params["canopy_replay_clock"] = [run, seconds]``, the trace's time in a run of
that number. Only the stamp that policies see changes; when requests come, and how long they wait
and take, stays real.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

from sglang_canopy.errors import CanopyError

KEY = "canopy_replay_clock"
"""The key of ``custom_params``. The value is ``[run, seconds]``, both 0 or more."""

_RUNS = 4
_LONGEST_S = 1e9


def check(custom_params: Any) -> tuple[int, float] | None:
    """The run and its time in seconds, or ``None``. Raises ``CanopyError`` (answered with 400)."""
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
    """Lays the time of each run behind everything that was stamped before it began."""

    def __init__(self) -> None:
        self._begin_s: OrderedDict[int, float] = OrderedDict()
        self._last_s = 0.0

    def stamp(self, run: int, seconds: float, now_s: float) -> float:
        """The stamp of a request of ``run`` that arrives at ``now_s`` on the server's clock.

        Never before what an earlier run was stamped with, so that time does not go back.
        """
        if run not in self._begin_s:
            self._begin_s[run] = max(now_s, self._last_s) - seconds
            while len(self._begin_s) > _RUNS:
                self._begin_s.popitem(last=False)
        stamped = self._begin_s[run] + seconds
        self._last_s = max(self._last_s, stamped)
        return stamped


clock = ReplayClock()
"""The clock of this process's requests."""
