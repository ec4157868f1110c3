"""When the session gate acts: thrash has begun, its cause is known, and holding back helps.

Without a gate agents either lose next to nothing or, past a cliff, most of what they compute. Those
who wait for the cliff arm too late: everybody inside has to be computed again first. So the gate
arms on the first losses of live sessions, if their footprints are beyond the memory, which is
what makes more of them certain, and if the device does not keep up. Once it has armed, footprints
beyond the memory are enough for a day. It disarms when nobody has waited for a while and little is lost, or when it does not help:
when as much is computed again with it as at the worst without it.
"""

from __future__ import annotations

import math

from sglang_canopy.admission.thrash import Thrash

FIRST_LOSSES = 0.05
"""Lost within the window, as a share of the capacity, that arms."""
_LOW, _HIGH = 0.25, 0.5
"""Shares of thrash: agents below the cliff are under the one, and past it above the other."""
_BEHIND, _WARY_BEHIND = 0.7, 0.5
"""Share of sessions that wait for the server instead of thinking: below it the device keeps up with
what it computes again, and to wait would take longer. The latter after one cliff."""
_FEW_BEHIND, _FEW_WARY_BEHIND = 0.96, 0.9
"""The same where only a few sessions fit: who waits for a place waits for much of another's session,
which takes longer than to compute again until nearly everybody waits."""
_NEWEST = 0.02
_WARY_S = 86_400.0
_HOLD_OFF_S = 600.0
"""For so long the gate stays disarmed after it did not help; twice as long each time."""


class Arming:
    """Whether the gate acts. The caller gives the times, in seconds."""

    def __init__(
        self, capacity_tokens: int, quiet_s: float, always: bool = False, few: float = 0.0
    ) -> None:
        self.always = always
        self._few = few
        self.armed = always
        self.thrash = Thrash(capacity_tokens)
        self.times_armed = 0
        self.times_in_vain = 0
        """Times that it disarmed because it did not help."""
        self._behind = 0.0
        self._answers = 0
        self._quiet_s = quiet_s
        self._quiet_since: float | None = None
        self._worst = 0.0
        """The greatest share of thrash while disarmed."""
        self._wary_until = self._not_before = -math.inf
        self._hold_off_s = _HOLD_OFF_S
        self._trial_lost = self._trial_computed = 0
        """Since sessions wait, or since it was last judged."""
        self._waiting = False

    def answered(self, lost: int, computed: int, working: float) -> None:
        """A prompt of which ``computed`` tokens were prefilled, ``lost`` of them once more, while
        the share ``working`` of the sessions waited for the server."""
        self._answers += 1
        self._behind += max(_NEWEST, 1.0 / self._answers) * (working - self._behind)
        self.thrash.answered(lost, computed)
        if not self.armed:
            self._worst = max(self._worst, self.thrash.share)
        elif self._waiting:
            self._trial_lost += lost
            self._trial_computed += computed

    def may_arm(self, now: float, fitting: float) -> bool:
        """Whether footprints beyond the memory would arm it, where so many sessions are ``fitting``
        into the memory."""
        if self.armed or now < self._not_before:
            return False
        few = fitting < self._few
        if now < self._wary_until:
            return self._behind >= (_FEW_WARY_BEHIND if few else _WARY_BEHIND)
        lost = self.thrash.lost >= FIRST_LOSSES * self.thrash.capacity_tokens
        return lost and self._behind >= (_FEW_BEHIND if few else _BEHIND)

    def arm(self, now: float) -> None:
        """Footprints are beyond the memory."""
        self.armed = True
        self.times_armed += 1
        self.thrash.clear()
        self._quiet_since = None
        self._trial_lost = self._trial_computed = 0

    def passed(self, now: float, waiting: bool) -> None:
        """It is ``now``, and sessions are ``waiting`` or none is. May disarm."""
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
        self.times_in_vain += 1
        self._not_before = now + self._hold_off_s
        self._wary_until = -math.inf
        self._hold_off_s *= 2
        self._disarm()

    def _disarm(self) -> None:
        self.armed = False
        self.thrash.clear()
        self._worst = 0.0
