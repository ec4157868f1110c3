"""Activates the session gate when agents' turns would finish faster with fewer sessions at once.

Without a gate agents recompute almost nothing or, if their KV does not fit, most of their tokens. With
one, N sessions that fit find their KV, but their places stand idle while they think. So hits are
not the goal. The gate becomes active on the first losses of active sessions if their footprints exceed the
memory and if the rate that it can reach clearly exceeds the measured one::

    min(N / (p + h), 1 / h)  >=  _MIN_GAIN * (turns finished per second)

p: mean pause of agents; h: device seconds of a turn that finds its KV, which are the measured
seconds per turn less the recomputed share. This is the bound of a closed network with one queue.
Turns finished per second, and their uncertainty, then decide whether it stays active.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from typing import NamedTuple

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


_WINDOW_PARTS = 64
"""Parts of a capacity that the window moves by; bounds its entries."""


@dataclass(slots=True)
class _Part:
    lost_tokens: int = 0
    computed_tokens: int = 0


class Thrash:
    """Thrash over the most recent computed prompt tokens, one capacity's worth."""

    def __init__(self, capacity_tokens: int) -> None:
        self.capacity_tokens = capacity_tokens
        self.lost_tokens = 0
        """Computed tokens that an active session's last turn had cached."""
        self.computed_tokens = 0
        self._parts: deque[_Part] = deque()
        """Lost and computed tokens of each part, the newest last."""

    @property
    def share(self) -> float:
        """Share of the computed tokens that were lost."""
        return self.lost_tokens / self.computed_tokens if self.computed_tokens else 0.0

    def record_prompt(self, lost_tokens: int, computed_tokens: int) -> None:
        """Record a prompt: ``computed_tokens`` were prefilled, ``lost_tokens`` of them again."""
        parts = self._parts
        if not parts or parts[-1].computed_tokens * _WINDOW_PARTS >= self.capacity_tokens:
            parts.append(_Part())
        parts[-1].lost_tokens += lost_tokens
        parts[-1].computed_tokens += computed_tokens
        self.lost_tokens += lost_tokens
        self.computed_tokens += computed_tokens
        while self.computed_tokens - parts[0].computed_tokens >= self.capacity_tokens:
            oldest = parts.popleft()
            self.lost_tokens -= oldest.lost_tokens
            self.computed_tokens -= oldest.computed_tokens

    def clear(self) -> None:
        self.lost_tokens = self.computed_tokens = 0
        self._parts.clear()


FIRST_LOSSES = 0.05
"""Losses within the window, as a share of the capacity, that activate the gate."""
_QUIET_SHARE = 0.25
"""Share of thrash below which a gate that holds nobody becomes inactive."""
_MIN_GAIN = 3.5
"""Gain from which on it becomes active: the bound above leaves out queues, the trial and the end of each
session (``benchmark/latency/gate.py``)."""
_TURNS_PER_SESSION = 4
"""Agents' turns that a rate is measured over, for each session that fits. The standard error of a rate
over n turns is 1 / sqrt(n) of it."""
_MIN_TURNS, _MAX_TURNS = 16, 64
_MAX_TRIAL_RATIO = 1.25
"""Length of a trial with few turns, in the time that they took before."""
_MIN_NEWEST_WEIGHT = 0.05
"""Least weight of the newest pause in the mean."""
_HOLD_OFF_S, _HOLD_OFF_TRIALS = 600.0, 33.0
"""Least time for which the gate stays inactive after it did not help, in seconds and in durations of
the trial, of which it then costs at most 3 %. Both double each time."""


class _TurnEnd(NamedTuple):
    busy_s: float
    tokens: int
    """Prompt tokens of all turns of the trial so far."""


class Activation:
    """Decides whether the gate is active. The caller passes times, in seconds. Rates count only the
    time in which the server has requests: an idle server is not a slow one."""

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
        self._turn_tokens = 0
        """Prompt tokens of agents' turns, since the trial began."""
        self._ends: deque[_TurnEnd] = deque(maxlen=_MAX_TURNS + 1)
        """Ends of the latest turns of agents."""
        self._needed_turns = _MIN_TURNS
        """Turns that a rate is measured over."""
        self._earlier_rate = 0.0
        """Prompt tokens per second before it became active."""
        self._expected_s = 0.0
        """Seconds of as many turns without the gate."""
        self._is_settled = False
        """Whether the sessions of the time before it became active have been paused."""
        self._has_waiting = False
        self._trial_s = 0.0
        """Seconds of the trial in which sessions waited."""
        self._inactive_until = -math.inf
        self._hold_off_factor = 1.0

    def _rates(self) -> tuple[float, float]:
        """Return the latest turns of agents per second, and their prompt tokens per second; zeros
        while too few are measured. A turn counts by its prompt, since prompts grow."""
        if len(self._ends) <= self._needed_turns:
            return 0.0, 0.0
        first, last = self._ends[-1 - self._needed_turns], self._ends[-1]
        seconds = last.busy_s - first.busy_s
        if seconds <= 0.0:
            return 0.0, 0.0
        return self._needed_turns / seconds, (last.tokens - first.tokens) / seconds

    def record_pause(self, pause_s: float) -> None:
        """Record the pause of an agent before its next turn."""
        self._pauses += 1
        weight = max(_MIN_NEWEST_WEIGHT, 1.0 / self._pauses)
        self.mean_pause_s += weight * (pause_s - self.mean_pause_s)

    def record_turn(self, tokens: int, exceeds_capacity: bool) -> None:
        """Record the end of an agent's turn now. ``tokens``: of its prompt; ``exceeds_capacity``:
        whether the sessions exceed the memory."""
        if self.active and not self._is_settled and not exceeds_capacity:
            self._is_settled = True
            self._begin_trial()
        if not self.active or (self._is_settled and self._has_waiting):
            self._turn_tokens += tokens
            self._ends.append(_TurnEnd(self._busy_s, self._turn_tokens))

    def may_activate(self, now: float, session_capacity: float) -> bool:
        """Return whether footprints beyond the memory would activate the gate. ``session_capacity``:
        number of sessions that fit."""
        if self.active or now < self._inactive_until:
            return False
        turns = _TURNS_PER_SESSION * session_capacity
        self._needed_turns = round(min(_MAX_TURNS, max(_MIN_TURNS, turns)))
        rate, _ = self._rates()
        if not rate or self.thrash.lost_tokens < FIRST_LOSSES * self.thrash.capacity_tokens:
            return False
        work_s = (1.0 - self.thrash.share) / rate
        bound = min(session_capacity / (self.mean_pause_s + work_s), 1.0 / max(work_s, 1e-9))
        return bound / rate >= _MIN_GAIN

    def activate(self) -> None:
        """Activate the gate: footprints exceed the memory."""
        self.active, self._is_settled = True, False
        self.times_activated += 1
        rate, self._earlier_rate = self._rates()
        self._expected_s = self._needed_turns / rate
        self._ends.clear()
        self.thrash.clear()
        self._quiet_since = math.inf

    def advance(self, now: float, has_waiting: bool, is_busy: bool) -> None:
        """Advance to ``now``. ``has_waiting``: whether any session waits; ``is_busy``: whether there was a
        request until now. May deactivate it."""
        if is_busy:
            self._busy_s += now - self._now
        if self._has_waiting:
            self._trial_s += now - self._now
        self._now, self._has_waiting = now, has_waiting
        if not self.active or self.always:
            return
        self._quiet_since = math.inf if has_waiting else min(self._quiet_since, now)
        if now - self._quiet_since >= self._quiet_s and self.thrash.share < _QUIET_SHARE:
            self._deactivate()
        elif has_waiting and self._is_settled:
            self._judge()

    def _judge(self) -> None:
        """Deactivate it unless turns finish faster than before, beyond the uncertainty of both rates."""
        turns = len(self._ends)
        if turns < self._needed_turns and self._trial_s < _MAX_TRIAL_RATIO * self._expected_s:
            return
        rate = self._turn_tokens / max(self._trial_s, 1e-9)
        error = math.hypot(rate, self._earlier_rate) / math.sqrt(max(1, turns))
        if rate - self._earlier_rate > error:
            self._hold_off_factor = 1.0
            self._begin_trial()
            return
        self.ineffective_activations += 1
        off_s = max(_HOLD_OFF_S, _HOLD_OFF_TRIALS * self._trial_s)
        self._inactive_until = self._now + self._hold_off_factor * off_s
        self._hold_off_factor *= 2.0
        self._deactivate()

    def _begin_trial(self) -> None:
        self._trial_s, self._turn_tokens = 0.0, 0
        self._ends.clear()

    def _deactivate(self) -> None:
        self.active = False
        self.thrash.clear()
        self._ends.clear()
