"""Arms the session gate when thrash has begun, its cause is known, and holding sessions back helps.

Without a gate agents recompute either almost nothing or, past a cliff, most of their tokens. A gate
that waits for the cliff arms too late, since all active sessions are recomputed first. So the gate
arms on the first losses of active sessions if their footprints exceed the memory, which makes more
losses certain, and if the device does not keep up. For a day after it has armed, footprints beyond
the memory are enough. It disarms if no session has waited for a while and losses are small, or if
it does not help: if the recomputed share is as large as the worst share without it.
"""

from __future__ import annotations

import math
from collections import deque

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

    def answered(self, lost: int, computed: int) -> None:
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
"""Losses within the window, as a share of the capacity, that arm the gate."""
_LOW, _HIGH = 0.25, 0.5
"""Shares of thrash: lower than the first below the cliff, higher than the second past it."""
_BEHIND, _WARY_BEHIND = 0.7, 0.5
"""Shares of sessions that wait for the server instead of thinking. Below them the device keeps up
with its recomputation, and waiting would take longer. The second applies after a cliff."""
_FEW_BEHIND, _FEW_WARY_BEHIND = 0.96, 0.9
"""The same if only a few sessions fit. A held session then waits until another session
ends, which takes longer than recomputation unless nearly all sessions wait."""
_NEWEST = 0.02
_WARY_S = 86_400.0
_HOLD_OFF_S = 600.0
"""Seconds for which the gate stays disarmed after it did not help; doubles each time."""


class Arming:
    """Decides whether the gate acts. The caller passes times, in seconds."""

    def __init__(
        self, capacity_tokens: int, quiet_s: float, always: bool = False, few: float = 0.0
    ) -> None:
        self.always = always
        self._few = few
        self.armed = always
        self.thrash = Thrash(capacity_tokens)
        self.times_armed = 0
        self.ineffective_arms = 0
        """Number of times it disarmed because it did not help."""
        self._behind = 0.0
        self._answers = 0
        self._quiet_s = quiet_s
        self._quiet_since: float | None = None
        self._worst = 0.0
        """Largest share of thrash while disarmed."""
        self._wary_until = self._not_before = -math.inf
        self._hold_off_s = _HOLD_OFF_S
        self._trial_lost = self._trial_computed = 0
        """Counts since sessions began to wait, or since the last judgement."""
        self._waiting = False

    def answered(self, lost: int, computed: int, working: float) -> None:
        """Record a prompt: ``computed`` prefilled tokens, ``lost`` of them recomputed, and the
        share ``working`` of sessions that waited for the server."""
        self._answers += 1
        self._behind += max(_NEWEST, 1.0 / self._answers) * (working - self._behind)
        self.thrash.answered(lost, computed)
        if not self.armed:
            self._worst = max(self._worst, self.thrash.share)
        elif self._waiting:
            self._trial_lost += lost
            self._trial_computed += computed

    def may_arm(self, now: float, fitting: float) -> bool:
        """Return whether footprints beyond the memory would arm the gate. ``fitting``: number of
        sessions that fit into the memory."""
        if self.armed or now < self._not_before:
            return False
        few = fitting < self._few
        if now < self._wary_until:
            return self._behind >= (_FEW_WARY_BEHIND if few else _WARY_BEHIND)
        lost = self.thrash.lost >= FIRST_LOSSES * self.thrash.capacity_tokens
        return lost and self._behind >= (_FEW_BEHIND if few else _BEHIND)

    def arm(self, now: float) -> None:
        """Arm the gate: footprints exceed the memory."""
        self.armed = True
        self.times_armed += 1
        self.thrash.clear()
        self._quiet_since = None
        self._trial_lost = self._trial_computed = 0

    def passed(self, now: float, waiting: bool) -> None:
        """Advance to ``now``; ``waiting``: whether any session waits. May disarm."""
        self._waiting = waiting
        if not self.armed or self.always:
            return
        self._wary_until = now + _WARY_S
        if waiting:
            self._quiet_since = None
        elif self._quiet_since is None:
            self._quiet_since = now
        if (
            self._quiet_since is not None
            and now - self._quiet_since >= self._quiet_s
            and self.thrash.share < _LOW
        ):
            self._disarm()
        elif self._trial_computed >= self.thrash.capacity_tokens:
            self._judge(now)

    def _judge(self, now: float) -> None:
        lost = self._trial_lost / self._trial_computed
        self._trial_lost = self._trial_computed = 0
        if lost <= max(_HIGH, self._worst):
            self._hold_off_s = _HOLD_OFF_S
            return
        self.ineffective_arms += 1
        self._not_before = now + self._hold_off_s
        self._wary_until = -math.inf
        self._hold_off_s *= 2
        self._disarm()

    def _disarm(self) -> None:
        self.armed = False
        self.thrash.clear()
        self._worst = 0.0
