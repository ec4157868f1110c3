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
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from sglang_canopy.admission.activation import GateSettings
from sglang_canopy.admission.footprint import Footprints
from sglang_canopy.admission.session import Session
from sglang_canopy.reuse.learner import ReuseModel
from sglang_canopy.tenant import Vouched

_GONE = 0.02
"""A session that has been silent for the horizon is over below this return probability. Until then
it keeps its place, even with a small charge."""
_RAW_CAPACITIES = 4
"""Maximum total size of whole thinking sessions, in capacities; beyond it, the longest silent ones
are over."""
_NEWCOMERS = ""
"""The share of names without an active session; no tenant's name is empty."""
_FEW = 8
"""If fewer numbers than this move between tenants, they are moved one by one."""


class Places:
    """Active and paused sessions with their footprints. The caller passes times, in seconds."""

    def __init__(self, settings: GateSettings, capacity_tokens: int, model: ReuseModel) -> None:
        self.settings = settings
        self.capacity_tokens = capacity_tokens
        self.footprints = Footprints(model, settings.horizon_s, settings.turns_ahead)
        self.active: OrderedDict[int, Session] = OrderedDict()
        """Active sessions by number, most recent request last."""
        self.count_by_tenant: Counter[Hashable] = Counter()
        """Number of active sessions by tenant."""
        self.tenant_changed: Callable[[Hashable, bool], None] = lambda _tenant, _active: None
        """Called with True when a tenant gets its first active session, with False when it loses its
        last one."""
        self.paused: OrderedDict[int, Session] = OrderedDict()
        """Paused sessions by number, the most recent pause last."""

    @property
    def outgrown(self) -> bool:
        """Whether the active sessions exceed the memory, and fewer sessions would fit."""
        return self.footprints.held_tokens > self.capacity_tokens and len(self.active) > 1

    @property
    def fitting(self) -> float:
        """Number of sessions like the active ones that would fit, with their next turns."""
        return self.capacity_tokens * len(self.active) / max(1.0, self.footprints.tokens)

    @property
    def share_waiting(self) -> float:
        """Share of the active sessions that had a request until one of them ended now."""
        return (1 + sum(s.under_way for s in self.active.values())) / max(1, len(self.active))

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
        self.count_by_tenant[session.charged_to] += 1
        if self.count_by_tenant[session.charged_to] == 1:
            self.tenant_changed(session.charged_to, True)
        self.footprints.enter(session, now)

    def leave(self, session: Session, now: float) -> None:
        """Remove ``session``, which is over or must wait when it returns."""
        self.paused.pop(session.number, None)
        if not session.active:
            return
        self.footprints.leave(session, now)
        session.active = False
        del self.active[session.number]
        self.count_by_tenant[session.charged_to] -= 1
        if not self.count_by_tenant[session.charged_to]:
            del self.count_by_tenant[session.charged_to]
            self.tenant_changed(session.charged_to, False)

    def pause(self, session: Session, now: float) -> None:
        """Pause the thinking ``session``: it must wait when it returns."""
        self.leave(session, now)
        session.path = ()  # little of its KV will remain
        self.paused[session.number] = session

    def choose_to_pause(self, candidates: Iterable[Session]) -> Session | None:
        """Return the session to pause first: the youngest thinking session with a charge. Sessions
        of tenants above their share with several sessions are preferred."""
        charged = self.footprints.charge_by_tenant
        share = self.capacity_tokens / max(1, len(self.count_by_tenant))

        def greedy(tenant: Hashable) -> bool:
            return self.count_by_tenant[tenant] > 1 and charged.get(tenant, 0.0) > share

        thinking = (s for s in candidates if not s.under_way and s.charge and s.is_agent)
        return max(thinking, key=lambda s: (greedy(s.charged_to), s.number), default=None)

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
            return youngest_of_largest_tenant(self.paused.values())
        if len(self.active) <= self.settings.max_sessions:
            return None
        largest = self.count_by_tenant.most_common(1)[0][0]
        idle = (s for s in self.active.values() if not s.under_way and s.charged_to == largest)
        return next(idle, None)

    def _is_gone(self, session: Session, now: float) -> bool:
        silent = now - session.last_contact_s > self.settings.horizon_s
        return silent and self.footprints.return_probability(session, now) < _GONE


def youngest_of_largest_tenant(sessions: Iterable[Session]) -> Session:
    """Return the youngest session of the tenant with most sessions."""
    candidates = [*sessions]
    tenant = Counter(session.charged_to for session in candidates).most_common(1)[0][0]
    return max((s for s in candidates if s.charged_to == tenant), key=lambda s: s.number)


class WaitingSessions:
    """Waiting sessions, sorted by number within each tenant. A call iterates over tenants."""

    def __init__(self) -> None:
        self.sessions: dict[int, Session] = {}
        self._by_share: dict[Hashable, list[int]] = {}
        """Share -> sorted numbers of the sessions that share it; no list is empty."""
        self._by_tenant: dict[Hashable, list[int]] = {}
        """Sorted numbers of each tenant's sessions."""
        self._active: set[Hashable] = set()
        """Tenants with an active session."""
        self._last_served: dict[Hashable, int] = {}
        self._served = 0

    def __len__(self) -> int:
        return len(self.sessions)

    def add(self, session: Session) -> None:
        if session.number in self.sessions:
            return
        self.sessions[session.number] = session
        insort(self._by_tenant.setdefault(session.charged_to, []), session.number)
        insort(self._by_share.setdefault(self._share_of(session.charged_to), []), session.number)

    def discard(self, session: Session) -> None:
        if self.sessions.pop(session.number, None) is not None:
            _remove(self._by_tenant, session.charged_to, session.number)
            _remove(self._by_share, self._share_of(session.charged_to), session.number)

    def set_active(self, tenant: Hashable, active: bool) -> None:
        """Record that ``tenant`` got its first active session or lost its last one."""
        before = self._share_of(tenant)
        (self._active.add if active else self._active.discard)(tenant)
        after, numbers = self._share_of(tenant), self._by_tenant.get(tenant, ())
        if before == after or not numbers:
            return
        if len(numbers) < _FEW:
            for number in numbers:
                _remove(self._by_share, before, number)
                insort(self._by_share.setdefault(after, []), number)
            return
        moved = set(numbers)
        rest = [number for number in self._by_share.pop(before) if number not in moved]
        if rest:
            self._by_share[before] = rest
        self._by_share[after] = sorted([*self._by_share.get(after, ()), *numbers])

    def in_order(self) -> Iterator[Session]:
        """Yield waiting sessions in the order in which the gate tries them.

        A tenant's second session follows the first sessions of all tenants, and so on. Do not change
        the sessions during the iteration.
        """
        waiting = self._by_share
        order = sorted(
            waiting, key=lambda share: (self._last_served.get(share, 0), waiting[share][0])
        )
        for nth in range(max(map(len, waiting.values()), default=0)):
            for share in order:
                if nth < len(waiting[share]):
                    yield self.sessions[waiting[share][nth]]

    def served(self, session: Session, active: Counter[Hashable]) -> None:
        """Move the tenant of an admitted session to the end. ``active``: admitted sessions by tenant,
        without this one."""
        self._served += 1
        self._last_served[self._share_of(session.charged_to)] = self._served
        # An admitted newcomer gets its own share, and has used it.
        self._last_served[session.charged_to] = self._served
        if len(self._last_served) > 2 * len(active) + 16:
            recent = {*active, session.charged_to, _NEWCOMERS}
            self._last_served = {
                name: served for name, served in self._last_served.items() if name in recent
            }

    def _share_of(self, tenant: Hashable) -> Hashable:
        separate = tenant in self._active or isinstance(tenant, Vouched)
        return tenant if separate else _NEWCOMERS


def _remove(lists: dict[Hashable, list[int]], name: Hashable, number: int) -> None:
    numbers = lists[name]
    del numbers[bisect_left(numbers, number)]
    if not numbers:
        del lists[name]


@dataclass(slots=True)
class GateCounts:
    admitted: int = 0
    """Sessions admitted, most of them at once."""
    delayed: int = 0
    """Admitted sessions that waited."""
    wait_sum_s: float = 0.0
    pauses: int = 0
    """Active sessions that lost their place until the rest fits."""
    forgotten: int = 0
    """Sessions assumed over: silent too long, or beyond the bound."""

    def admit(self, session: Session, now: float) -> None:
        """Count the admission of ``session``, new or paused."""
        waited_s = now - session.waits_since
        self.admitted += 1
        self.delayed += waited_s > 0.0
        self.wait_sum_s += waited_s

    def stats(self) -> dict[str, Any]:
        """Return the counts for the status."""
        return {
            "admitted_sessions": self.admitted,
            "delayed_sessions": self.delayed,
            "pauses": self.pauses,
            "forgotten_sessions": self.forgotten,
            "wait_seconds": round(self.wait_sum_s, 3),
        }

    def agreement(self) -> dict[str, Any]:
        """Return admissions, their waits and pauses, which are equal on all ranks."""
        return {
            "gate_admitted": self.admitted,
            "gate_wait_seconds": self.wait_sum_s,
            "gate_pauses": self.pauses,
        }
