"""Activates the session gate when agents' turns would finish faster with fewer sessions at once.

Without a gate agents recompute almost nothing or, if their KV does not fit, most of their tokens. With
one, N sessions that fit find their KV, but their places stand idle while they think. So hits are
not the goal. The gate becomes active on the first losses of active sessions if their footprints exceed the
memory and if the rate that it can reach clearly exceeds the measured one::

    min(N / (p + h), 1 / h)  >=  _LEAST_GAIN * (turns finished per second)

p: mean pause of agents; h: device seconds of a turn that finds its KV, which are the measured
seconds per turn less the recomputed share. This is the bound of a closed network with one queue.
Turns finished per second, and their uncertainty, then decide whether it stays active.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass

OFF, AUTO = "off", "auto"


@dataclass(frozen=True, slots=True)
class GateSettings:
    """Constants of a session gate; measurements use others."""

    always: bool = False
    """Always active, for every session: the baseline of measurements."""
    age_s: float = 60.0
    """Seconds after which no other session may overtake a waiting session."""
    horizon_s: float = 120.0
    """A thinking session is charged by its probability of return within these seconds."""
    turns_ahead: int = 3
    """Turns of likely growth charged to a session, which stays and outgrows its prompt."""
    overrun_interval_s: float = 900.0
    """Interval at which the next session starts without room, if it waited as long."""
    max_sessions: int = 4096
    """Largest number of active sessions, without sessions that have a request."""
    max_paused: int = 1024
    """Largest number of paused sessions."""


_PARTS = 64
"""Parts of a capacity that the window moves by; bounds its entries."""


class Thrash:
    """Thrash over the most recent computed prompt tokens, one capacity's worth."""

    def __init__(self, capacity_tokens: int) -> None:
        self.capacity_tokens = capacity_tokens
        self.lost = 0
        """Computed tokens that an active session's last turn had cached."""
        self.computed = 0
        self._parts: deque[list[int]] = deque()
        """``lost`` and ``computed`` of each part, the newest last."""

    @property
    def share(self) -> float:
        """Share of the computed tokens that were lost."""
        return self.lost / self.computed if self.computed else 0.0

    def record_prompt(self, lost: int, computed: int) -> None:
        """Record a prompt: ``computed`` prefilled tokens, ``lost`` of them recomputed."""
        parts = self._parts
        if not parts or parts[-1][1] * _PARTS >= self.capacity_tokens:
            parts.append([0, 0])
        parts[-1][0] += lost
        parts[-1][1] += computed
        self.lost += lost
        self.computed += computed
        while self.computed - parts[0][1] >= self.capacity_tokens:
            lost, computed = parts.popleft()
            self.lost -= lost
            self.computed -= computed

    def clear(self) -> None:
        """Reset all counts."""
        self.lost = self.computed = 0
        self._parts.clear()


FIRST_LOSSES = 0.05
"""Losses within the window, as a share of the capacity, that activate the gate."""
_QUIET_SHARE = 0.25
"""Share of thrash below which a gate that holds nobody becomes inactive."""
_LEAST_GAIN = 3.5
"""Gain from which on it becomes active: the bound above leaves out queues, the trial and the end of each
session (``benchmark/latency/gate.py``)."""
_TURNS_PER_SESSION = 4
"""Agents' turns that a rate is measured over, for each session that fits. The standard error of a rate
over n turns is 1 / sqrt(n) of it."""
_LEAST_TURNS, _MOST_TURNS = 16, 64
"""Bounds of these turns."""
_PATIENCE = 1.25
"""Length of a trial with few turns, in the time that they took before."""
_NEWEST = 0.05
"""Least weight of the newest pause in the mean."""
_HOLD_OFF_S, _HOLD_OFF_TRIALS = 600.0, 33.0
"""Least time for which the gate stays inactive after it did not help, in seconds and in durations of
the trial, of which it then costs at most 3 %. Both double each time."""


class Activation:
    """Decides whether the gate is active. The caller passes times, in seconds.

    Rates count only the time in which the server has requests: an idle server is not a slow one.
    """

    def __init__(self, capacity_tokens: int, quiet_s: float, always: bool = False) -> None:
        self.always = always
        self.active = always
        self.thrash = Thrash(capacity_tokens)
        self.times_activated = 0
        self.ineffective_activations = 0
        """Number of activations that ended because it did not help."""
        self.mean_pause_s = 0.0
        self._pauses = 0
        self._quiet_s = quiet_s
        self._quiet_since = math.inf
        """Time since which no session waits, while it is active."""
        self._now = 0.0
        self._busy_s = 0.0
        """Seconds with a request, up to ``_now``."""
        self._tokens = 0
        """Prompt tokens of agents' turns, since the trial began."""
        self._ends: deque[tuple[float, int]] = deque(maxlen=_MOST_TURNS + 1)
        """Ends of the latest turns of agents in busy seconds, and ``_tokens`` then."""
        self._needed = _LEAST_TURNS
        """Turns that a rate is measured over."""
        self._earlier_rate = 0.0
        """Prompt tokens per second before it became active."""
        self._expected_s = 0.0
        """Seconds of as many turns without the gate."""
        self._settled = False
        """Whether the sessions of the time before it became active have been paused."""
        self._waiting = False
        self._trial_s = 0.0
        """Seconds of the trial in which sessions waited."""
        self._not_before = -math.inf
        self._hold_offs = 1.0

    def _rates(self) -> tuple[float, float]:
        """Return the latest turns of agents per second, and their prompt tokens per second; zeros
        while too few are measured. A turn counts by its prompt, since prompts grow."""
        first = len(self._ends) - 1 - self._needed
        if first < 0 or self._ends[-1][0] <= self._ends[first][0]:
            return 0.0, 0.0
        seconds = self._ends[-1][0] - self._ends[first][0]
        return self._needed / seconds, (self._ends[-1][1] - self._ends[first][1]) / seconds

    def record_pause(self, pause_s: float) -> None:
        """Record the pause of an agent before its next turn."""
        self._pauses += 1
        self.mean_pause_s += max(_NEWEST, 1.0 / self._pauses) * (pause_s - self.mean_pause_s)

    def record_turn(self, tokens: int, exceeds_capacity: bool) -> None:
        """Record the end of an agent's turn now. ``tokens``: of its prompt; ``exceeds_capacity``:
        whether the sessions exceed the memory."""
        if self.active and not self._settled and not exceeds_capacity:
            self._settled = True
            self._begin()
        if not self.active or (self._settled and self._waiting):
            self._tokens += tokens
            self._ends.append((self._busy_s, self._tokens))

    def may_activate(self, now: float, session_capacity: float) -> bool:
        """Return whether footprints beyond the memory would activate the gate. ``session_capacity``:
        number of sessions that fit."""
        if self.active or now < self._not_before:
            return False
        turns = _TURNS_PER_SESSION * session_capacity
        self._needed = round(min(_MOST_TURNS, max(_LEAST_TURNS, turns)))
        rate, _ = self._rates()
        if not rate or self.thrash.lost < FIRST_LOSSES * self.thrash.capacity_tokens:
            return False
        work_s = (1.0 - self.thrash.share) / rate
        bound = min(session_capacity / (self.mean_pause_s + work_s), 1.0 / max(work_s, 1e-9))
        return bound / rate >= _LEAST_GAIN

    def activate(self) -> None:
        """Activate the gate: footprints exceed the memory."""
        self.active, self._settled = True, False
        self.times_activated += 1
        rate, self._earlier_rate = self._rates()
        self._expected_s = self._needed / rate
        self._ends.clear()
        self.thrash.clear()
        self._quiet_since = math.inf

    def advance(self, now: float, waiting: bool, busy: bool) -> None:
        """Advance to ``now``. ``waiting``: whether any session waits; ``busy``: whether there was a
        request until now. May deactivate it."""
        if busy:
            self._busy_s += now - self._now
        if self._waiting:
            self._trial_s += now - self._now
        self._now, self._waiting = now, waiting
        if not self.active or self.always:
            return
        self._quiet_since = math.inf if waiting else min(self._quiet_since, now)
        if now - self._quiet_since >= self._quiet_s and self.thrash.share < _QUIET_SHARE:
            self._deactivate()
        elif waiting and self._settled:
            self._judge()

    def _judge(self) -> None:
        """Deactivate it unless turns finish faster than before, beyond the uncertainty of both rates."""
        turns = len(self._ends)
        if turns < self._needed and self._trial_s < _PATIENCE * self._expected_s:
            return
        rate = self._tokens / max(self._trial_s, 1e-9)
        error = math.hypot(rate, self._earlier_rate) / math.sqrt(max(1, turns))
        if rate - self._earlier_rate > error:
            self._hold_offs = 1.0
            self._begin()
            return
        self.ineffective_activations += 1
        off_s = max(_HOLD_OFF_S, _HOLD_OFF_TRIALS * self._trial_s)
        self._not_before = self._now + self._hold_offs * off_s
        self._hold_offs *= 2.0
        self._deactivate()

    def _begin(self) -> None:
        """Begin a trial."""
        self._trial_s, self._tokens = 0.0, 0
        self._ends.clear()

    def _deactivate(self) -> None:
        self.active = False
        self.thrash.clear()
        self._ends.clear()
