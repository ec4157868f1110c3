"""Active, paused and waiting sessions, and counts of their admissions.

A session keeps its place while its return is likely. When active sessions outgrow the memory,
thinking agents' sessions are paused, the youngest first, since older sessions are closer to their
end. A paused session waits when it returns, ahead of all younger sessions.

Parties (``tenant.Parties``) take turns; within a party the oldest session is first. All names without
an active session take one turn together, so that inventing a name per session gains no more than one
turn per round. A tenant that a gateway vouches for always has its own.
"""

from __future__ import annotations

import struct
import zlib
from bisect import bisect_left, insort
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from sglang_canopy.admission.footprint import Footprints
from sglang_canopy.admission.session import Session
from sglang_canopy.admission.settings import GateSettings
from sglang_canopy.reuse.learner import ReuseModel
from sglang_canopy.tenant import Vouched

_GONE = 0.02
"""A session that has been silent for the horizon is over below this return probability. Until then
it keeps its place, even with a small charge."""
_RAW_CAPACITIES = 4
"""Maximum total size of whole thinking sessions, in capacities; beyond it, the longest silent ones
are over."""
_NEWCOMERS = ""
"""The turn shared by names without an active session; no tenant's name is empty."""
_FEW = 8
"""If fewer numbers than this move between parties, they are moved one by one."""
_EVENT = struct.Struct("<qdd")
_PAUSED = -1.0


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


class Line:
    """Waiting sessions, sorted by number within each party. A call iterates over parties."""

    def __init__(self) -> None:
        self.sessions: dict[int, Session] = {}
        self._in_turn: dict[Hashable, list[int]] = {}
        """Turn -> sorted numbers of the sessions that share it; no list is empty."""
        self._by_party: dict[Hashable, list[int]] = {}
        """Sorted numbers of each party's sessions."""
        self._active: set[Hashable] = set()
        """Parties with an active session."""
        self._turns: dict[Hashable, int] = {}
        self._turn = 0

    def __len__(self) -> int:
        return len(self.sessions)

    def add(self, session: Session) -> None:
        if session.number in self.sessions:
            return
        self.sessions[session.number] = session
        insort(self._by_party.setdefault(session.party, []), session.number)
        insort(self._in_turn.setdefault(self._turn_of(session.party), []), session.number)

    def discard(self, session: Session) -> None:
        if self.sessions.pop(session.number, None) is not None:
            _remove(self._by_party, session.party, session.number)
            _remove(self._in_turn, self._turn_of(session.party), session.number)

    def set_active(self, party: Hashable, active: bool) -> None:
        """Record that ``party`` got its first active session or lost its last one."""
        before = self._turn_of(party)
        (self._active.add if active else self._active.discard)(party)
        after, numbers = self._turn_of(party), self._by_party.get(party, ())
        if before == after or not numbers:
            return
        if len(numbers) < _FEW:
            for number in numbers:
                _remove(self._in_turn, before, number)
                insort(self._in_turn.setdefault(after, []), number)
            return
        moved = set(numbers)
        left = [number for number in self._in_turn.pop(before) if number not in moved]
        if left:
            self._in_turn[before] = left
        self._in_turn[after] = sorted([*self._in_turn.get(after, ()), *numbers])

    def in_turn(self) -> Iterator[Session]:
        """Yield waiting sessions in the order in which the gate tries them.

        A party's second session follows the first sessions of all parties, and so on. Do not change
        the line during the iteration.
        """
        waiting = self._in_turn
        order = sorted(waiting, key=lambda turn: (self._turns.get(turn, 0), waiting[turn][0]))
        for place in range(max(map(len, waiting.values()), default=0)):
            for turn in order:
                if place < len(waiting[turn]):
                    yield self.sessions[waiting[turn][place]]

    def took_turn(self, session: Session, active: Counter[Hashable]) -> None:
        """Move the party of an admitted session to the end. ``active``: admitted sessions by party,
        without this one."""
        self._turn += 1
        self._turns[self._turn_of(session.party)] = self._turn
        # An admitted newcomer gets its own turn, and has used it.
        self._turns[session.party] = self._turn
        if len(self._turns) > 2 * len(active) + 16:
            kept = {*active, session.party, _NEWCOMERS}
            self._turns = {p: turn for p, turn in self._turns.items() if p in kept}

    def _turn_of(self, party: Hashable) -> Hashable:
        own = party in self._active or isinstance(party, Vouched)
        return party if own else _NEWCOMERS


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
    _digest: int = 0

    def admit(self, session: Session, now: float) -> None:
        """Count the admission of ``session``, new or paused."""
        waited_s = now - session.waits_since
        self.admitted += 1
        self.delayed += waited_s > 0.0
        self.wait_sum_s += waited_s
        self._note(session, now, waited_s)

    def pause(self, session: Session, now: float) -> None:
        self.pauses += 1
        self._note(session, now, _PAUSED)

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
        """Return admissions, pauses, and a digest of both with their times; equal on all ranks."""
        return {
            "gate_admitted": self.admitted,
            "gate_pauses": self.pauses,
            "gate_digest": f"{self._digest:08x}",
        }

    def _note(self, session: Session, now: float, what: float) -> None:
        self._digest = zlib.crc32(_EVENT.pack(session.number, now, what), self._digest)
