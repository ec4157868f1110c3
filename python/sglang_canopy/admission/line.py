"""Sessions that wait for admission, and the order in which the gate tries them.

Parties (``tenant.Parties``) take turns; within a party the oldest session is first. All names without
an active session take one turn together, so that inventing a name per session gains no more than one
turn per round. A tenant that a gateway vouches for always has its own.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Hashable, Iterator

from sglang_canopy.admission.session import Session
from sglang_canopy.tenant import Vouched

_NEWCOMERS = ""
"""The turn shared by names without an active session; no tenant's name is empty."""
_FEW = 8
"""If fewer numbers than this move between parties, they are moved one by one."""


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
