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

GATE_OFF, GATE_AUTO = "off", "auto"


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
"""Parts into which the window divides the capacity; it drops its oldest part whole."""


@dataclass(slots=True)
class _WindowPart:
    lost_tokens: int = 0
    computed_tokens: int = 0


class Thrash:
    """Lost tokens among the latest computed prompt tokens, as many as the capacity holds."""

    def __init__(self, capacity_tokens: int) -> None:
        self.capacity_tokens = capacity_tokens
        self.lost_tokens = 0
        """Computed tokens that an active session's last turn had cached."""
        self.computed_tokens = 0
        self._parts: deque[_WindowPart] = deque()
        """Lost and computed tokens of each part, the newest last."""

    @property
    def lost_share(self) -> float:
        """Share of the computed tokens that were lost."""
        return self.lost_tokens / self.computed_tokens if self.computed_tokens else 0.0

    def record_prompt(self, lost_tokens: int, computed_tokens: int) -> None:
        """Record a prompt: ``computed_tokens`` were prefilled, ``lost_tokens`` of them again."""
        parts = self._parts
        if not parts or parts[-1].computed_tokens * _WINDOW_PARTS >= self.capacity_tokens:
            parts.append(_WindowPart())
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


_ACTIVATING_LOST_SHARE = 0.05
"""Lost tokens in the window, as a share of the capacity, that activate the gate."""
_QUIET_LOST_SHARE = 0.25
"""Share of lost tokens below which a gate that holds no session becomes inactive."""
_MIN_GAIN = 3.5
"""Gain from which on it becomes active, above 1 because the bound ignores queues, the trial and the end of
each session (``benchmark/latency/gate.py``)."""
_TURNS_PER_SESSION = 4
"""Agents' turns that a rate is measured over, for each session that fits. The standard error of a rate
over n turns is 1 / sqrt(n) of it."""
_MIN_RATE_TURNS, _MAX_RATE_TURNS = 16, 64
_MAX_TRIAL_RATIO = 1.25
"""Longest trial with few turns, as a multiple of the time that they took before."""
_MIN_PAUSE_WEIGHT = 0.05
"""Smallest weight of the newest pause in the mean."""
_MIN_HOLD_OFF_S, _MIN_HOLD_OFF_TRIALS = 600.0, 33.0
"""Shortest time for which the gate stays inactive after it did not help: in seconds, and in durations of
the trial, which then takes at most 3 % of the time. Both double each time."""


class _TurnEnd(NamedTuple):
    busy_s: float
    prompt_tokens: int
    """Prompt tokens of all turns of the trial so far."""


class Activation:
    """Decides whether the gate is active. The caller passes times, in seconds. Rates are per second in
    which the server has requests, because an idle server is not a slow one."""

    def __init__(self, capacity_tokens: int, quiet_s: float, always: bool = False) -> None:
        self.always = always
        self.is_active = always
        self.thrash = Thrash(capacity_tokens)
        self.times_activated = 0
        self.ineffective_activations = 0
        """Number of activations that ended because it did not help."""
        self.mean_pause_s = 0.0
        self._pause_count = 0
        self._quiet_s = quiet_s
        self._quiet_since = math.inf
        """Time since which no session waits, while it is active."""
        self._now = 0.0
        self._busy_s = 0.0
        """Seconds with a request, up to ``_now``."""
        self._trial_tokens = 0
        """Prompt tokens of agents' turns since the trial began."""
        self._turn_ends: deque[_TurnEnd] = deque(maxlen=_MAX_RATE_TURNS + 1)
        """Ends of the latest turns of agents."""
        self._needed_turns = _MIN_RATE_TURNS
        """Turns that a rate is measured over."""
        self._earlier_tokens_per_s = 0.0
        """Prompt tokens per second before it became active."""
        self._expected_trial_s = 0.0
        """Seconds that the turns of a trial took without the gate."""
        self._is_settled = False
        """Whether the sessions of the time before it became active have been paused."""
        self._has_waiting = False
        self._trial_s = 0.0
        """Seconds of the trial in which sessions waited."""
        self._inactive_until = -math.inf
        self._hold_off_factor = 1.0

    def _turn_rates(self) -> tuple[float, float]:
        """Return the latest turns of agents per second, and their prompt tokens per second; zeros
        while too few are measured. A turn counts by its prompt, since prompts grow."""
        if len(self._turn_ends) <= self._needed_turns:
            return 0.0, 0.0
        oldest, newest = self._turn_ends[-1 - self._needed_turns], self._turn_ends[-1]
        busy_s = newest.busy_s - oldest.busy_s
        if busy_s <= 0.0:
            return 0.0, 0.0
        prompt_tokens = newest.prompt_tokens - oldest.prompt_tokens
        return self._needed_turns / busy_s, prompt_tokens / busy_s

    def record_pause(self, pause_s: float) -> None:
        """Record the pause of an agent before its next turn."""
        self._pause_count += 1
        weight = max(_MIN_PAUSE_WEIGHT, 1.0 / self._pause_count)
        self.mean_pause_s += weight * (pause_s - self.mean_pause_s)

    def record_turn(self, prompt_tokens: int, exceeds_capacity: bool) -> None:
        """Record the end of an agent's turn now. ``exceeds_capacity``: whether the sessions exceed the
        memory."""
        if self.is_active and not self._is_settled and not exceeds_capacity:
            self._is_settled = True
            self._begin_trial()
        if not self.is_active or (self._is_settled and self._has_waiting):
            self._trial_tokens += prompt_tokens
            self._turn_ends.append(_TurnEnd(self._busy_s, self._trial_tokens))

    def may_activate(self, now: float, session_capacity: float) -> bool:
        """Return whether footprints beyond the memory would activate the gate. ``session_capacity``:
        number of sessions that fit."""
        if self.is_active or now < self._inactive_until:
            return False
        turns = _TURNS_PER_SESSION * session_capacity
        self._needed_turns = round(min(_MAX_RATE_TURNS, max(_MIN_RATE_TURNS, turns)))
        turns_per_s, _ = self._turn_rates()
        min_lost_tokens = _ACTIVATING_LOST_SHARE * self.thrash.capacity_tokens
        if not turns_per_s or self.thrash.lost_tokens < min_lost_tokens:
            return False
        turn_s = (1.0 - self.thrash.lost_share) / turns_per_s
        bound_per_s = min(session_capacity / (self.mean_pause_s + turn_s), 1.0 / max(turn_s, 1e-9))
        return bound_per_s / turns_per_s >= _MIN_GAIN

    def activate(self) -> None:
        """Activate the gate: footprints exceed the memory."""
        self.is_active, self._is_settled = True, False
        self.times_activated += 1
        turns_per_s, self._earlier_tokens_per_s = self._turn_rates()
        self._expected_trial_s = self._needed_turns / turns_per_s
        self._turn_ends.clear()
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
        if not self.is_active or self.always:
            return
        self._quiet_since = math.inf if has_waiting else min(self._quiet_since, now)
        if now - self._quiet_since >= self._quiet_s and self.thrash.lost_share < _QUIET_LOST_SHARE:
            self._deactivate()
        elif has_waiting and self._is_settled:
            self._judge()

    def _judge(self) -> None:
        """Deactivate it unless turns finish faster than before, beyond the uncertainty of both rates."""
        turns = len(self._turn_ends)
        if turns < self._needed_turns and self._trial_s < _MAX_TRIAL_RATIO * self._expected_trial_s:
            return
        tokens_per_s = self._trial_tokens / max(self._trial_s, 1e-9)
        rate_norm = math.hypot(tokens_per_s, self._earlier_tokens_per_s)
        if tokens_per_s - self._earlier_tokens_per_s > rate_norm / math.sqrt(max(1, turns)):
            self._hold_off_factor = 1.0
            self._begin_trial()
            return
        self.ineffective_activations += 1
        hold_off_s = max(_MIN_HOLD_OFF_S, _MIN_HOLD_OFF_TRIALS * self._trial_s)
        self._inactive_until = self._now + self._hold_off_factor * hold_off_s
        self._hold_off_factor *= 2.0
        self._deactivate()

    def _begin_trial(self) -> None:
        self._trial_s, self._trial_tokens = 0.0, 0
        self._turn_ends.clear()

    def _deactivate(self) -> None:
        self.is_active = False
        self.thrash.clear()
        self._turn_ends.clear()
