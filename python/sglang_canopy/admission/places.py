"""Active, paused and waiting sessions, and counts of their admissions.

A session keeps its place while its return is likely. When active sessions outgrow the memory,
thinking agents' sessions are paused, the youngest first, since older sessions are closer to their
end. A paused session waits when it returns, ahead of all younger sessions.

Tenants (``tenant.ChargedTenants``) are served in rotation; within a tenant the oldest session is
first. All names without an active session count as one tenant, so that inventing a name per session
gains no more than one admission per round. A tenant that a gateway vouches for always counts alone.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter, OrderedDict
from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass
from itertools import zip_longest

from sglang_canopy.admission.activation import GateSettings
from sglang_canopy.admission.footprint import Footprints
from sglang_canopy.admission.session import Session
from sglang_canopy.reuse.learner import ReuseModel
from sglang_canopy.tenant import Vouched

_GONE_PROBABILITY = 0.02
"""A session that has been silent for the horizon is over if it returns with a lower probability. Until
then it keeps its place, even with a small charge."""
_MAX_THINKING_CAPACITIES = 4
"""Most tokens of all thinking sessions, as a multiple of the capacity; beyond it, the longest silent
sessions are over."""
_NEWCOMERS = ("newcomers", None)
"""The share of all tenants without an active session; no tenant is a pair."""


class Places:
    """Active and paused sessions with their footprints. The caller passes times, in seconds."""

    def __init__(self, settings: GateSettings, capacity_tokens: int, model: ReuseModel) -> None:
        self.settings = settings
        self.capacity_tokens = capacity_tokens
        self.footprints = Footprints(model, settings.horizon_s, settings.turns_ahead)
        self.active_sessions: OrderedDict[int, Session] = OrderedDict()
        """Active sessions by number, most recent request last."""
        self.active_counts: Counter[Hashable] = Counter()
        """Number of active sessions by tenant."""
        self.paused_sessions: OrderedDict[int, Session] = OrderedDict()
        """Paused sessions by number, the most recent pause last."""

    @property
    def exceeds_capacity(self) -> bool:
        """Whether the active sessions exceed the memory, and fewer sessions would fit."""
        return self.footprints.held_tokens > self.capacity_tokens and len(self.active_sessions) > 1

    @property
    def session_capacity(self) -> float:
        """Number of sessions like the active ones that would fit, with their next turns."""
        needed_tokens = max(1.0, self.footprints.total_tokens)
        return self.capacity_tokens * len(self.active_sessions) / needed_tokens

    @property
    def busy_share(self) -> float:
        """Share of the active sessions with a request, including the request that has just ended."""
        busy_sessions = sum(session.has_request for session in self.active_sessions.values())
        return (1 + busy_sessions) / max(1, len(self.active_sessions))

    def fits(self, session: Session) -> bool:
        """Return whether ``session`` fits, including the future tokens of all sessions."""
        if not self.active_sessions:
            return True
        free_tokens = self.capacity_tokens - self.footprints.total_tokens
        return free_tokens >= 0 and self.footprints.needed_tokens(session) <= free_tokens

    def enter(self, session: Session, now: float) -> None:
        session.is_active = True
        self.paused_sessions.pop(session.number, None)
        self.active_sessions[session.number] = session
        self.active_counts[session.charged_to] += 1
        self.footprints.enter(session, now)

    def leave(self, session: Session, now: float) -> None:
        """Remove ``session`` and its charges, if it is active or paused."""
        self.paused_sessions.pop(session.number, None)
        if not session.is_active:
            return
        self.footprints.leave(session, now)
        session.is_active = False
        del self.active_sessions[session.number]
        self.active_counts[session.charged_to] -= 1
        if not self.active_counts[session.charged_to]:
            del self.active_counts[session.charged_to]
            del self.footprints.tenant_charges[session.charged_to]

    def pause(self, session: Session, now: float) -> None:
        """Pause the thinking ``session``: it must wait when it returns."""
        self.leave(session, now)
        session.path = ()  # little of its KV will remain
        self.paused_sessions[session.number] = session

    def choose_to_pause(self, candidates: Iterable[Session]) -> Session | None:
        """Return the session to pause first: the youngest thinking session with a charge. Sessions
        of tenants above their share with several sessions are preferred."""
        counts, charges = self.active_counts, self.footprints.tenant_charges
        share_tokens = self.capacity_tokens / max(1, len(counts))

        def is_greedy(tenant: Hashable) -> bool:
            return counts[tenant] > 1 and charges[tenant] > share_tokens

        thinking = (s for s in candidates if not s.has_request and s.charged_tokens and s.is_agent)
        return max(thinking, key=lambda s: (is_greedy(s.charged_to), s.number), default=None)

    def refresh(self, now: float) -> Iterator[Session]:
        """Update all charges; yield the sessions that are over."""
        thinking_tokens, max_thinking_tokens = 0, _MAX_THINKING_CAPACITIES * self.capacity_tokens
        for session in [*reversed(self.active_sessions.values())]:
            self.footprints.update(session, now)
            if session.has_request:
                continue
            thinking_tokens += session.tokens
            if thinking_tokens > max_thinking_tokens or self._is_gone(session, now):
                yield session
        for session in [*self.paused_sessions.values()]:
            if self._is_gone(session, now):
                yield session

    def surplus_session(self) -> Session | None:
        """Return a session to drop if a bound is exceeded: the longest silent of the largest tenant."""
        if len(self.paused_sessions) > self.settings.max_paused:
            sessions = self.paused_sessions
            counts = Counter(session.charged_to for session in sessions.values())
        elif len(self.active_sessions) > self.settings.max_sessions:
            sessions, counts = self.active_sessions, self.active_counts
        else:
            return None
        [(tenant, _)] = counts.most_common(1)
        idle = (s for s in sessions.values() if not s.has_request and s.charged_to == tenant)
        return next(idle, None)

    def _is_gone(self, session: Session, now: float) -> bool:
        is_silent = now - session.last_contact_s > self.settings.horizon_s
        return is_silent and self.footprints.return_probability(session, now) < _GONE_PROBABILITY


class WaitingSessions:
    """Waiting sessions, in turn of their shares. A session's share is fixed when its wait begins.
    ``active_counts``: numbers of active sessions, without tenants that have none."""

    def __init__(self, active_counts: Counter[Hashable]) -> None:
        self.sessions: dict[int, Session] = {}
        self._by_share: dict[Hashable, list[int]] = {}
        """Share -> sorted numbers of the sessions that share it; no list is empty."""
        self._active_counts = active_counts
        self._last_admission: dict[Hashable, int] = {}
        """Share or tenant -> number of its last admission."""
        self._admission_count = 0

    def __len__(self) -> int:
        return len(self.sessions)

    def add(self, session: Session) -> None:
        """Add ``session``, which does not wait yet."""
        self.sessions[session.number] = session
        session.share_key = share = self._share_of(session.charged_to)
        if share not in self._by_share:
            # A new share is behind all waiting shares except the one that was admitted last.
            self._last_admission.setdefault(share, self._admission_count - 1)
        insort(self._by_share.setdefault(share, []), session.number)

    def discard(self, session: Session) -> bool:
        """Return whether ``session`` was waiting."""
        if self.sessions.pop(session.number, None) is None:
            return False
        numbers = self._by_share[session.share_key]
        del numbers[bisect_left(numbers, session.number)]
        if not numbers:
            del self._by_share[session.share_key]
        return True

    def in_turn(self) -> Iterator[Session]:
        """Yield waiting sessions in the order in which the gate tries them. The second session of a
        share follows the first sessions of all shares, and so on. Do not change the sessions during the
        iteration."""
        waiting = self._by_share
        order = sorted(waiting, key=lambda share: (self._last_admission[share], waiting[share][0]))
        for numbers in zip_longest(*(waiting[share] for share in order)):
            yield from (self.sessions[number] for number in numbers if number is not None)

    def admit(self, session: Session) -> None:
        """Remove ``session``, which is admitted and not active yet, and move its share to the end."""
        tenant = session.charged_to
        share = session.share_key if self.discard(session) else self._share_of(tenant)
        self._admission_count += 1
        # An admitted newcomer gets its own share, and has used it.
        self._last_admission[share] = self._last_admission[tenant] = self._admission_count
        if len(self._last_admission) > 2 * (len(self._active_counts) + len(self._by_share)) + 16:
            recent = {*self._active_counts, *self._by_share, tenant, _NEWCOMERS}
            self._last_admission = {k: n for k, n in self._last_admission.items() if k in recent}

    def _share_of(self, tenant: Hashable) -> Hashable:
        is_separate = tenant in self._active_counts or isinstance(tenant, Vouched)
        return tenant if is_separate else _NEWCOMERS


@dataclass(slots=True)
class GateCounts:
    """Counts since the start, as the status shows them."""

    admitted_sessions: int = 0
    """Most of them did not wait."""
    delayed_sessions: int = 0
    """Admitted sessions that waited."""
    wait_seconds: float = 0.0
    pauses: int = 0
    """Active sessions that lost their place to make room."""
    forgotten_sessions: int = 0
    """Sessions assumed over: silent too long, or beyond the bound."""
