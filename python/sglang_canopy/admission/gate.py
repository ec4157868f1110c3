"""The session gate: new sessions start while the footprints of those under way fit.

When sessions need more memory than there is, each turn evicts the prefix of the next one's, and
everything is computed again. The gate keeps the number of sessions under way below that: a request
of an admitted session always passes, the first one of a new session waits until its footprint
fits. The server and the simulator drive the same object. It reads no clock and draws nothing:
equal calls give equal answers on every rank.
"""

from __future__ import annotations

import math
import struct
import zlib
from collections import Counter, OrderedDict
from collections.abc import Hashable
from itertools import islice
from typing import Any

from sglang_canopy.admission.budget import Budget
from sglang_canopy.admission.footprint import Footprints, common_blocks
from sglang_canopy.admission.index import SessionIndex
from sglang_canopy.admission.line import Line
from sglang_canopy.admission.session import Session
from sglang_canopy.admission.settings import GateSettings
from sglang_canopy.records import Request
from sglang_canopy.reuse.learner import ReuseModel

_REFRESH_S, _REFRESH_AT_LEAST_S = 1.0, 30.0
"""Charges are brought up to date this often while sessions wait, and while none do."""
_GONE = 0.02
"""A session that was silent for the horizon, and whose probability of return is below this, is
over. Until then it keeps its place, however little it is charged."""
_RAW_CAPACITIES = 4
"""Tokens of sessions that think, whole, in capacities: beyond that the most silent are over."""
_ENTERED = struct.Struct("<qdd")
_TRIES = 64
"""Waiting sessions looked at for one place."""
_LEAST_RETRY_S, _MOST_RETRY_S = 1.0, 120.0
_FIRST_INTERVAL_S = 5.0
_NEWEST = 0.2


class SessionGate:
    """Who may start. ``capacity_tokens``: KV that device and host hold together.

    Call ``arrive`` for each request in order of arrival, ``finish`` or ``leave`` when it has ended,
    and ask ``holds`` before it is scheduled. Times are in seconds on the requests' clock.
    """

    def __init__(self, settings: GateSettings, capacity_tokens: int) -> None:
        self.settings = settings
        self.capacity_tokens = capacity_tokens
        self.now = 0.0
        self.model = ReuseModel(max_samples=20_000, max_blocks=250_000)
        self.footprints = Footprints(self.model, settings.horizon_s, settings.turns_ahead)
        self.budget = Budget(settings.share * capacity_tokens, settings.excess)
        self.line = Line()
        self.index = SessionIndex()
        self.admitted = 0
        """Sessions admitted since the start."""
        self.delayed = 0
        """Of them, those that waited."""
        self.refused = 0
        """Requests refused."""
        self.revoked = 0
        """Sessions of tenants above their share that lost their place to another tenant's."""
        self.forgotten = 0
        """Sessions that were taken for over: silent for too long, or too many to remember."""
        self.wait_sum_s = 0.0
        """Waits of all that were admitted."""
        self._by_ticket: dict[Hashable, tuple[Session, Request]] = {}
        self._active: OrderedDict[int, Session] = OrderedDict()
        """By number; the one whose request came last is at the end."""
        self._of_tenant: Counter[str | None] = Counter()
        self._over: Session | None = None
        """The session that was admitted without room."""
        self._order = (0, 0)
        self._numbers = 0
        self._refreshed = -math.inf
        self._changed = False
        self._interval_s = _FIRST_INTERVAL_S
        self._last_admitted: float | None = None

    # ---- what is asked ----

    @property
    def budget_tokens(self) -> float:
        """What the footprints may add up to."""
        return self.budget.tokens

    @property
    def pressed(self) -> bool:
        """Whether any session waits: only then the order of requests is the gate's."""
        return bool(self.line)

    @property
    def refresh_due_s(self) -> float:
        """When charges will be brought up to date next, if anybody calls ``advance`` then."""
        return self._refreshed + _REFRESH_S

    def holds(self, ticket: Hashable) -> bool:
        """Whether this request's session may not start yet. ``False`` for an unknown one."""
        found = self._by_ticket.get(ticket)
        return found is not None and not found[0].active

    def seniority(self, ticket: Hashable) -> int:
        """Lower is older: the order of requests inside the gate. An unknown one comes first."""
        found = self._by_ticket.get(ticket)
        return -1 if found is None else found[0].number

    def retry_after_s(self, ticket: Hashable) -> float:
        """When a refused client may try again: how long the sessions before it will take."""
        session = self._by_ticket[ticket][0]
        before = sum(number < session.number for number in self.line.sessions)
        wait_s = self._interval_s * (1 + before)
        return float(math.ceil(min(max(wait_s, _LEAST_RETRY_S), _MOST_RETRY_S)))

    # ---- what happens ----

    def advance(self, now: float) -> None:
        """Time passes; it never goes back. Sessions may be admitted."""
        self.now = max(self.now, now)
        if self._changed or (self.line and self.now >= self._refreshed + _REFRESH_S):
            self._admit()

    def arrive(self, ticket: Hashable, request: Request) -> None:
        """A request came. ``ticket`` names it from now on."""
        assert ticket not in self._by_ticket, f"request {ticket!r} is here already"
        self.now = max(self.now, request.time)
        self.footprints.block_tokens = request.block_tokens
        session = self.index.find(request)
        label = self.model.arrive(request)
        category = self.model.categories.get(label)
        if session is None:
            self._numbers += 1
            session = Session(
                self._numbers, request.tenant, request.conversation, self.now, category
            )
        session.ticket, session.category, session.seen = ticket, category, self.now
        session.expires = None
        session.left = _left(session, request)
        self._by_ticket[ticket] = session, request
        self.index.describe(session, request, request.prompt_tokens)
        if session.active:
            self._active.move_to_end(session.number)
            self.footprints.moved(session, self.now)
        elif session.number not in self.line.sessions:
            session.waits_since = self.now
            self.line.add(session)
        self._changed = True
        self._admit()

    def refuse(self, ticket: Hashable) -> None:
        """A held request is refused: its place in the line is kept for when it is tried again."""
        retry_s = self.retry_after_s(ticket)
        session, _ = self._by_ticket.pop(ticket)
        assert not session.active, "only a request that is held is refused"
        session.ticket = None
        session.expires = self.now + 2.0 * retry_s
        self.refused += 1
        absent = [s for s in self.line.sessions.values() if s.ticket is None]
        if len(absent) > self.settings.max_refused:
            held = Counter(s.tenant for s in absent)
            most = held.most_common(1)[0][0]
            self._forget(max((s for s in absent if s.tenant == most), key=lambda s: s.number))

    def finish(self, ticket: Hashable, request: Request) -> None:
        """A request was answered; ``request`` says how it ended. Unknown tickets are ignored."""
        found = self._by_ticket.pop(ticket, None)
        if found is None:
            return
        session, _ = found
        label = self.model.finish(request)
        self.model.gap_begins(request, self.now)
        session.category = self.model.categories.get(label)
        session.ticket, session.answered, session.seen = None, True, self.now
        if session.left and request.cached_tokens is not None:
            self.budget.found(request.cached_tokens, session.left, bool(self.line))
        self.footprints.answered(request.output_tokens)
        self.index.describe(session, request, request.prompt_tokens + request.output_tokens)
        if session.over or request.over:
            self._forget(session)
        else:
            self.footprints.moved(session, self.now)
            self._bound()
        self._changed = True

    def leave(self, ticket: Hashable) -> None:
        """A request is gone without an answer: aborted or timed out, waiting or under way."""
        found = self._by_ticket.pop(ticket, None)
        if found is None:
            return
        session, _ = found
        session.ticket = None
        if session.active and session.answered and not session.over:
            self.footprints.moved(session, self.now)
        else:
            self._forget(session)
        self._changed = True

    def hint_over(self, tenant: str | None, conversation: Hashable) -> None:
        """A client says that a conversation is over."""
        session = self.index.of_conversation(tenant, conversation)
        if session is None:
            return
        session.over = True
        if session.ticket is None:
            self._forget(session)
            self._changed = True

    def stats(self) -> dict[str, Any]:
        """Counts since the start, and what is now; tokens and seconds."""
        return {
            "mode": self.settings.mode,
            "waiting_sessions": len(self.line),
            "active_sessions": len(self._active),
            "footprint_tokens": round(self.footprints.tokens),
            "budget_tokens": round(self.budget_tokens),
            "admitted_sessions": self.admitted,
            "delayed_sessions": self.delayed,
            "refused_requests": self.refused,
            "revoked_sessions": self.revoked,
            "forgotten_sessions": self.forgotten,
            "wait_seconds": round(self.wait_sum_s, 3),
            "clock_s": round(self.now, 3),
        }

    def agreement(self) -> dict[str, Any]:
        """How many sessions were admitted, and a digest of which and when: equal on all ranks."""
        count, digest = self._order
        return {"gate_admitted": count, "gate_digest": f"{digest:08x}"}

    # ---- sessions ----

    def _forget(self, session: Session) -> None:
        """``session`` is over, as far as the gate is concerned."""
        self.index.hide(session)
        self.line.discard(session)
        if session.active:
            self._drop_active(session)

    def _drop_active(self, session: Session) -> None:
        self.footprints.leave(session, self.now)
        session.active = False
        del self._active[session.number]
        self._of_tenant[session.tenant] -= 1
        if not self._of_tenant[session.tenant]:
            del self._of_tenant[session.tenant]
        if self._over is session:
            self._over = None

    def _bound(self) -> None:
        """Sessions that think are remembered up to a number, and up to so many whole tokens."""
        if len(self._active) > self.settings.max_sessions:
            most = self._of_tenant.most_common(1)[0][0]
            for session in self._active.values():
                if session.ticket is None and session.tenant == most:
                    self._forget(session)
                    self.forgotten += 1
                    return

    # ---- admission ----

    def _refresh(self) -> None:
        """Bring all charges up to date, and forget who will hardly return."""
        self._refreshed = self.now
        raw, limit = 0, _RAW_CAPACITIES * self.capacity_tokens
        for session in [*reversed(self._active.values())]:
            self.footprints.update(session, self.now)
            if session.ticket is not None:
                continue
            raw += session.tokens
            gone = self.now - session.seen > self.settings.horizon_s
            gone = gone and self.footprints.return_probability(session, self.now) < _GONE
            if gone or raw > limit:
                self._forget(session)
                self.forgotten += 1
        for session in [*self.line.sessions.values()]:
            if session.expires is not None and session.expires <= self.now:
                self._forget(session)
        if self._over is not None and self.footprints.tokens <= self.budget_tokens:
            self._over = None

    def _admit(self) -> None:
        """Admit whom there is room for, in turn."""
        self._changed = False
        if self.now >= self._refreshed + _REFRESH_AT_LEAST_S:
            self._refresh()
        while self.line and self._admit_next():
            pass
        if self.line and self.now >= self.refresh_due_s:
            # Those who wait are worth a look at who has been silent since.
            self._refresh()
            while self.line and self._admit_next():
                pass

    def _admit_next(self) -> bool:
        """Whether one of the waiting sessions was admitted."""
        for session in islice(self.line.in_turn(self._of_tenant), _TRIES):
            aged = self._waited_s(session) >= self.settings.age_s
            if session.ticket is None:
                # Refused, and soon back: what is free is kept for it if it is aged.
                if aged and self._active:
                    return False
                continue
            if (
                self._fits(session)
                or (aged and self._make_room(session))
                or self._may_exceed(session)
            ):
                self._enter(session)
                return True
            if aged:
                return False  # the next room that is free is for it
        return False

    def _waited_s(self, session: Session) -> float:
        return self.now - session.waits_since

    def _fits(self, session: Session) -> bool:
        need = self.footprints.need(session)
        return not self._active or self.footprints.tokens + need <= self.budget_tokens

    def _may_exceed(self, session: Session) -> bool:
        """Whether ``session`` has waited so long that it starts without room, one at a time."""
        if self._over is not None or self._waited_s(session) < self.settings.over_age_s:
            return False
        self._over = session
        return True

    def _make_room(self, session: Session) -> bool:
        """Take room for an aged session of a tenant below its share from one above its own: its
        youngest sessions that think have to wait when they return."""
        parties = len({*self._of_tenant, session.tenant})
        if parties < 2:
            return False
        share = self.budget_tokens / parties
        need = self.footprints.need(session)
        if self.footprints.of_tenant.get(session.tenant, 0.0) + need > share:
            return False
        kept = max(share, self.settings.tenant_floor * self.budget_tokens)
        for other in sorted(self._active.values(), key=lambda s: -s.number):
            charge = self.footprints.of_tenant.get(other.tenant, 0.0)
            if other.ticket is not None or charge - other.charge < kept or not other.charge:
                continue
            self._forget(other)
            self.revoked += 1
            if self._fits(session):
                return True
        return False

    def _enter(self, session: Session) -> None:
        self.line.discard(session)
        self.line.took_turn(session, self._of_tenant)
        session.active = True
        self._active[session.number] = session
        self._of_tenant[session.tenant] += 1
        self.footprints.enter(session, self.now)
        waited_s = self._waited_s(session)
        self.admitted += 1
        entered = _ENTERED.pack(session.number, self.now, waited_s)
        self._order = (self.admitted, zlib.crc32(entered, self._order[1]))
        if waited_s > 0.0:
            self.delayed += 1
            self.wait_sum_s += waited_s
            if self._last_admitted is not None:
                gap_s = self.now - self._last_admitted
                self._interval_s += _NEWEST * (gap_s - self._interval_s)
        self._last_admitted = self.now


def _left(session: Session, request: Request) -> int:
    """Tokens that ``request`` should find: what the last turn of its session left, if the session
    was charged for it."""
    if not (session.active and session.answered and session.charge):
        return 0
    shared = common_blocks(session.path, request.path) * request.block_tokens
    return min(shared, session.tokens, request.prompt_tokens)
