"""The session gate: while agents thrash, their sessions start only as fast as their KV fits.

If sessions need more memory than there is, each turn evicts the prefix of another session's next
turn. While ``activation.py`` measures that, the first request of an agent's new session (``agents.py``)
waits until its footprint fits, and sessions that outgrow the memory are paused (``places.py``).

The server and the simulator drive the same object. It reads no clock and uses no randomness: equal
calls return equal results on every rank.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable
from dataclasses import asdict
from itertools import count, islice
from typing import Any, NamedTuple

from sglang_canopy.admission.activation import Activation, GateSettings
from sglang_canopy.admission.agents import Agents
from sglang_canopy.admission.footprint import common_blocks
from sglang_canopy.admission.places import GateCounts, Places, WaitingSessions
from sglang_canopy.admission.session import Session, SessionIndex
from sglang_canopy.records import ABORT, GATEWAY, Request
from sglang_canopy.reuse.learner import ReuseModel
from sglang_canopy.tenant import ChargedTenants

_MIN_REFRESH_INTERVAL_S, _MAX_REFRESH_INTERVAL_S = 1.0, 30.0
"""Seconds between updates of the charges: while sessions wait, and otherwise."""
_MAX_ENTERED_AT_ONCE = 256
"""Maximum sessions admitted by one call after the gate became inactive, which takes about 5 ms."""
_MIN_BUSY_SHARE = 0.7
"""Smallest share of sessions with a request at which the gate becomes active. Below it the device keeps
up with its recomputation, and clients determine the measured rate."""
_MAX_TRIED_SESSIONS = 64
"""Waiting sessions tried for one place."""


class GatedRequest(NamedTuple):
    session: Session
    request: Request


class SessionGate:
    """Decides which sessions start. ``capacity_tokens``: KV that device and host hold together.

    Call ``arrive`` for each request in order of arrival, ``finish`` or ``leave`` at its end, and
    ``holds`` before it is scheduled. Times are in seconds on the requests' clock. The wait is
    bounded: the next session in turn starts without room every ``overrun_interval_s``.
    """

    def __init__(self, settings: GateSettings, capacity_tokens: int) -> None:
        self.settings = settings
        self.now = 0.0
        self.model = ReuseModel(max_samples=20_000, max_blocks=250_000)
        """Learns pauses, from an answer to the next arrival. The policies' models learn times between
        admissions, which the gate lengthens."""
        self.places = Places(settings, capacity_tokens, self.model)
        self.footprints = self.places.footprints
        self.activation = Activation(capacity_tokens, settings.horizon_s, settings.always)
        self.agents = Agents()
        self.waiting = WaitingSessions(self.places.active_counts)
        self.charged_tenants = ChargedTenants()
        self.session_index = SessionIndex()
        self.counts = GateCounts()
        self.requests: dict[Hashable, GatedRequest] = {}
        """Each request that waits or is answered, by its ticket."""
        self._numbers = count(1)
        self._last_overrun_s = self._last_refresh_s = -math.inf  # times
        self._may_have_room = False

    @property
    def refresh_due_s(self) -> float:
        """Time of the next update of the charges, if ``advance`` is called then."""
        return self._last_refresh_s + _MIN_REFRESH_INTERVAL_S

    def holds(self, ticket: Hashable) -> bool:
        """Return whether this request's session may not start yet; ``False`` if unknown."""
        gated = self.requests.get(ticket)
        return gated is not None and not gated.session.is_active

    def advance(self, now: float) -> None:
        """Advance to ``now``; time never decreases. May admit sessions."""
        self._pass_time(now)
        if self._may_have_room or (self.waiting and self.now >= self.refresh_due_s):
            self._admit_in_turn()

    def arrive(self, ticket: Hashable, request: Request) -> Session:
        """Add an arriving request, named ``ticket`` from now on. Return its session."""
        assert ticket not in self.requests, f"request {ticket!r} is here already"
        self._pass_time(request.time)
        self.footprints.block_tokens = request.block_tokens
        session = self.session_index.find(request)
        if session is None:
            category = self.model.category_of_first_turn(request)
            tenant, number = request.tenant, next(self._numbers)
            charged_to = self.charged_tenants.choose(tenant, request.source == GATEWAY, self.now)
            session = Session(number, tenant, request.conversation, self.now, category, charged_to)
        elif self.agents.judge_return(session, request, self.now):
            silent_s = self.now - session.last_contact_s
            self.activation.record_pause(min(silent_s, self.settings.horizon_s))
        session.cached_before_tokens = self._cached_tokens_before(session, request)
        self.model.record_waiting(request)  # while many wait, most returns have yet to be answered
        session.has_request, session.last_contact_s = True, self.now
        session.arrived_s = request.time
        self.requests[ticket] = GatedRequest(session, request)
        self.session_index.index(session, request, request.prompt_tokens)
        if session.is_active:
            self.places.active_sessions.move_to_end(session.number)
            self.footprints.update_path(session, self.now)
        else:
            self._queue_or_admit(session, request)
        self._admit_in_turn()
        return session

    def finish(self, ticket: Hashable, request: Request) -> None:
        session = self._remove(ticket)
        if session is None:
            return
        session.last_contact_s = self.now
        self._record_prompt(session, request)
        if request.stop != ABORT:
            label = self.model.learn_answer(request.copy(time=session.arrived_s), self.now)
            session.category = self.model.categories.get(label)
            self.agents.judge_answer(session, request)
        session.has_answer = True
        self.footprints.learn_output_length(request.output_tokens)
        self.session_index.index(session, request, request.prompt_tokens + request.output_tokens)
        if session.is_over or request.over:
            self._forget(session)
        if session.is_active:
            self.footprints.update_path(session, self.now)
        self._activate_and_pause()

    def _remove(self, ticket: Hashable) -> Session | None:
        """Remove a request. Return its session; ``None`` without such a request."""
        gated = self.requests.pop(ticket, None)
        if gated is None:
            return None
        gated.session.has_request = False
        return gated.session

    def leave(self, ticket: Hashable) -> None:
        """Remove a request that was aborted or timed out, waiting or running."""
        session = self._remove(ticket)
        if session is None:
            return
        if not session.has_answer or session.is_over:
            self._forget(session)
        elif session.is_active:
            self.footprints.update_path(session, self.now)
        else:  # paused before
            self.waiting.discard(session)
            self.places.pause(session, self.now)
        self._activate_and_pause()

    def hint_over(self, tenant: str | None, conversation: Hashable) -> None:
        """Apply a client's hint that a conversation is over."""
        session = self.session_index.by_conversation.get((tenant, conversation))
        if session is None:
            return
        session.is_over = True
        if not session.has_request:
            self._forget(session)
            self._may_have_room = True

    def stats(self) -> dict[str, Any]:
        """Return counts since the start and current values, in tokens and seconds."""
        return {
            "active": self.activation.is_active,
            "times_activated": self.activation.times_activated,
            "ineffective_activations": self.activation.ineffective_activations,
            "thrash_share": round(self.activation.thrash.lost_share, 4),
            "waiting_sessions": len(self.waiting),
            "active_sessions": len(self.places.active_sessions),
            "paused_sessions": len(self.places.paused_sessions),
            "footprint_tokens": round(self.footprints.total_tokens),
            "capacity_tokens": self.places.capacity_tokens,
            **asdict(self.counts),
        }

    # ---- activation ----

    def _cached_tokens_before(self, session: Session, request: Request) -> int:
        """Return the tokens that the session's last turn cached for ``request``."""
        if not (session.is_active and session.is_agent):
            return 0  # a paused session made room once
        self.footprints.update(session, self.now)
        if not session.charged_tokens:
            return 0
        shared_tokens = common_blocks(session.path, request.path) * request.block_tokens
        return min(shared_tokens, session.tokens, request.prompt_tokens)

    def _record_prompt(self, session: Session, request: Request) -> None:
        """Count computed and recomputed tokens of the prompt."""
        cached_tokens = request.cached_tokens
        if cached_tokens is not None:
            computed_tokens = request.prompt_tokens - cached_tokens
            missing_tokens = max(0, session.cached_before_tokens - cached_tokens)
            lost_tokens = min(computed_tokens, missing_tokens)
            self.activation.thrash.record_prompt(lost_tokens, computed_tokens)
        if session.is_agent:
            self.activation.record_turn(request.prompt_tokens, self.places.exceeds_capacity)

    def _pass_time(self, now: float) -> None:
        self.now = max(self.now, now)
        self.activation.advance(self.now, bool(self.waiting), bool(self.requests))
        if self.waiting and not self.activation.is_active:  # it has become inactive
            for session in [*islice(self.waiting.sessions.values(), _MAX_ENTERED_AT_ONCE)]:
                self._enter(session)

    def _activate_and_pause(self) -> None:
        """Activate the gate and pause, if necessary, after the end of a request."""
        self._may_have_room = True
        surplus = self.places.surplus_session()
        if surplus is not None:
            self._forget(surplus)
            self.counts.forgotten_sessions += 1
        is_or_may_be_active = self.activation.is_active or (
            self.activation.may_activate(self.now, self.places.session_capacity)
            and self.places.busy_share > _MIN_BUSY_SHARE
        )
        if not is_or_may_be_active or not self.places.exceeds_capacity:
            return
        if self.now >= self.refresh_due_s:
            self._refresh()
        if not self.places.exceeds_capacity:
            return
        if not self.activation.is_active:
            self.activation.activate()
        active = self.places.active_sessions.values()
        while self.places.exceeds_capacity and self._pause_one(active):
            pass

    # ---- sessions ----

    def _queue_or_admit(self, session: Session, request: Request) -> None:
        if session.number in self.waiting.sessions:
            return
        session.waiting_since_s = self.now
        is_gated = self.settings.always or self.agents.recognise(session, request)
        if self.activation.is_active and is_gated:
            self.places.leave(session, self.now)
            self.waiting.add(session)
        else:
            self._enter(session)

    def _enter(self, session: Session) -> None:
        waited_s = self.now - session.waiting_since_s
        self.counts.admitted_sessions += 1
        self.counts.delayed_sessions += waited_s > 0.0
        self.counts.wait_seconds += waited_s
        self.waiting.admit(session)
        self.places.enter(session, self.now)

    def _forget(self, session: Session) -> None:
        if not session.has_request:
            self.agents.judge_silence(session, self.now)
        self.session_index.remove(session)
        self.waiting.discard(session)
        self.places.leave(session, self.now)

    def _pause_one(self, candidates: Iterable[Session]) -> bool:
        session = self.places.choose_to_pause(candidates)
        if session is None:
            return False
        self.places.pause(session, self.now)
        self.counts.pauses += 1
        return True

    # ---- admission ----

    def _refresh(self) -> None:
        """Update all charges, and drop sessions unlikely to return."""
        self._last_refresh_s, places = self.now, self.places
        for session in (*places.active_sessions.values(), *places.paused_sessions.values()):
            if not session.has_request:
                self.agents.judge_silence(session, self.now)
        for session in places.refresh(self.now):
            self._forget(session)
            self.counts.forgotten_sessions += 1

    def _admit_in_turn(self) -> None:
        """Admit the waiting sessions that fit, in turn."""
        self._may_have_room = False
        if self.now >= self._last_refresh_s + _MAX_REFRESH_INTERVAL_S:
            self._refresh()
        self._admit_all()
        if self.waiting and self.now >= self.refresh_due_s:
            self._refresh()  # sessions may have become unlikely to return
            self._admit_all()

    def _admit_all(self) -> None:
        while self.activation.is_active and self.waiting and self._admit_next():
            pass

    def _admit_next(self) -> bool:
        """Admit the next waiting session that fits; return whether there was one."""
        for session in islice(self.waiting.in_turn(), _MAX_TRIED_SESSIONS):
            is_aged = self.now - session.waiting_since_s >= self.settings.age_s
            may_enter = self.places.fits(session) or (is_aged and self._make_room(session))
            since_s = max(session.waiting_since_s, self._last_overrun_s)
            if not may_enter and self.now - since_s >= self.settings.overrun_interval_s:
                may_enter, self._last_overrun_s = True, self.now
            if may_enter:
                self._enter(session)
                return True
            if is_aged:
                return False  # reserve the next free room for it
        return False

    def _make_room(self, session: Session) -> bool:
        """Pause sessions of tenants above their share, for an aged session of a tenant below it."""
        places, tenant = self.places, session.charged_to
        charges = self.footprints.tenant_charges
        share_tokens = places.capacity_tokens / len({*places.active_counts, tenant})
        if charges.get(tenant, 0.0) + self.footprints.needed_tokens(session) > share_tokens:
            return False
        while not places.fits(session):
            candidates = (
                other
                for other in places.active_sessions.values()
                if charges[other.charged_to] - other.charged_tokens >= share_tokens
            )
            if not self._pause_one(candidates):
                return False
        return True
