"""Active sessions, and sessions paused until the rest fits.

A session keeps its place while its return is likely. When active sessions outgrow the memory,
thinking agents' sessions are paused, the youngest first, since older sessions are closer to their
end. A paused session waits when it returns, ahead of all younger sessions.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator

from sglang_canopy.admission.footprint import Footprints
from sglang_canopy.admission.session import Session
from sglang_canopy.admission.settings import GateSettings
from sglang_canopy.reuse.learner import ReuseModel

_GONE = 0.02
"""A session that has been silent for the horizon is over below this return probability. Until then
it keeps its place, even with a small charge."""
_RAW_CAPACITIES = 4
"""Maximum total size of whole thinking sessions, in capacities; beyond it, the longest silent ones
are over."""


class Places:
    """Active and paused sessions with their footprints. The caller passes times, in seconds."""

    def __init__(self, settings: GateSettings, capacity_tokens: int, model: ReuseModel) -> None:
        self.settings = settings
        self.capacity_tokens = capacity_tokens
        self.footprints = Footprints(model, settings.horizon_s, settings.turns_ahead)
        self.active: OrderedDict[int, Session] = OrderedDict()
        """Active sessions by number, most recent request last."""
        self.of_party: Counter[Hashable] = Counter()
        """Number of active sessions by party."""
        self.party_changed: Callable[[Hashable, bool], None] = lambda _party, _active: None
        """Called with True when a party gets its first active session, with False when it loses its
        last one."""
        self.paused: OrderedDict[int, Session] = OrderedDict()
        """Paused sessions by number, the most recent pause last."""

    @property
    def outgrown(self) -> bool:
        """Whether the active sessions exceed the memory, and fewer sessions would fit."""
        return self.footprints.held_tokens > self.capacity_tokens and len(self.active) > 1

    @property
    def fitting(self) -> float:
        """Number of sessions like the active sessions that would fit."""
        return self.capacity_tokens * len(self.active) / max(1.0, self.footprints.held_tokens)

    def fits(self, session: Session) -> bool:
        """Return whether ``session`` fits, including the future tokens of all sessions."""
        if not self.active:
            return True
        room = self.capacity_tokens - self.footprints.tokens
        return room >= 0 and self.footprints.need(session) <= room

    def enter(self, session: Session, now: float) -> None:
        """Make ``session`` active."""
        session.active = True
        self.paused.pop(session.number, None)
        self.active[session.number] = session
        self.of_party[session.party] += 1
        if self.of_party[session.party] == 1:
            self.party_changed(session.party, True)
        self.footprints.enter(session, now)

    def leave(self, session: Session, now: float) -> None:
        """Remove ``session``, which is over or must wait when it returns."""
        self.paused.pop(session.number, None)
        if not session.active:
            return
        self.footprints.leave(session, now)
        session.active = False
        del self.active[session.number]
        self.of_party[session.party] -= 1
        if not self.of_party[session.party]:
            del self.of_party[session.party]
            self.party_changed(session.party, False)

    def pause(self, session: Session, now: float) -> None:
        """Pause the thinking ``session``: it must wait when it returns."""
        self.leave(session, now)
        session.path = ()  # little of its KV will remain
        self.paused[session.number] = session

    def to_pause(self, wanted: Iterable[Session]) -> Session | None:
        """Return the session to pause first: the youngest thinking session with a charge. Sessions
        of parties above their share with several sessions are preferred."""
        charged = self.footprints.of_party
        share = self.capacity_tokens / max(1, len(self.of_party))

        def greedy(party: Hashable) -> bool:
            return self.of_party[party] > 1 and charged.get(party, 0.0) > share

        thinking = (s for s in wanted if not s.under_way and s.charge and s.is_agent)
        return max(thinking, key=lambda s: (greedy(s.party), s.number), default=None)

    def refresh(self, now: float) -> Iterator[Session]:
        """Update all charges; yield the sessions that are over."""
        raw, limit = 0, _RAW_CAPACITIES * self.capacity_tokens
        for session in [*reversed(self.active.values())]:
            self.footprints.update(session, now)
            if session.under_way:
                continue
            raw += session.tokens
            if raw > limit or self._is_gone(session, now):
                yield session
        for session in [*self.paused.values()]:
            if self._is_gone(session, now):
                yield session

    def too_many(self) -> Session | None:
        """Return a session to drop if a bound is exceeded."""
        if len(self.paused) > self.settings.max_paused:
            return of_largest_party(self.paused.values())
        if len(self.active) <= self.settings.max_sessions:
            return None
        most = self.of_party.most_common(1)[0][0]
        idle = (s for s in self.active.values() if not s.under_way and s.party == most)
        return next(idle, None)

    def _is_gone(self, session: Session, now: float) -> bool:
        silent = now - session.seen > self.settings.horizon_s
        return silent and self.footprints.return_probability(session, now) < _GONE


def of_largest_party(sessions: Iterable[Session]) -> Session:
    """Return the youngest session of the party with most sessions."""
    held = [*sessions]
    most = Counter(session.party for session in held).most_common(1)[0][0]
    return max((s for s in held if s.party == most), key=lambda s: s.number)
