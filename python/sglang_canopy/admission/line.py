"""Sessions that wait for admission, and the order in which the gate tries them.

Parties take turns; within a party the oldest session is first. A tenant with an active session is a
party. All tenants without one are a single party, so that inventing a tenant per session gains no
more than one turn per round.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Iterator

from sglang_canopy.admission.session import Session

_NEWCOMERS = ""
"""The party of tenants without an active session; no tenant's name is empty."""
_FEW = 8
"""Fewer numbers than this are moved between parties one by one."""


class Line:
    """Waiting sessions, sorted by number within each party. A call iterates over parties, not
    sessions."""

    def __init__(self) -> None:
        self.sessions: dict[int, Session] = {}
        """Waiting sessions by number."""
        self._parties: dict[str | None, list[int]] = {}
        """Sorted numbers of each party; no list is empty."""
        self._by_tenant: dict[str | None, list[int]] = {}
        """Sorted numbers of each tenant."""
        self._active: set[str | None] = set()
        """Tenants with an active session."""
        self._turns: dict[str | None, int] = {}
        self._turn = 0

    def __len__(self) -> int:
        return len(self.sessions)

    def add(self, session: Session) -> None:
        if session.number in self.sessions:
            return
        self.sessions[session.number] = session
        insort(self._by_tenant.setdefault(session.tenant, []), session.number)
        insort(self._parties.setdefault(self._party(session.tenant), []), session.number)

    def discard(self, session: Session) -> None:
        if self.sessions.pop(session.number, None) is not None:
            _remove(self._by_tenant, session.tenant, session.number)
            _remove(self._parties, self._party(session.tenant), session.number)

    def set_active(self, tenant: str | None, active: bool) -> None:
        """Record that ``tenant`` got its first active session, or lost its last."""
        before = self._party(tenant)
        (self._active.add if active else self._active.discard)(tenant)
        after, numbers = self._party(tenant), self._by_tenant.get(tenant, ())
        if before == after or not numbers:
            return
        if len(numbers) < _FEW:
            for number in numbers:
                _remove(self._parties, before, number)
                insort(self._parties.setdefault(after, []), number)
            return
        moved = set(numbers)
        left = [number for number in self._parties.pop(before) if number not in moved]
        if left:
            self._parties[before] = left
        self._parties[after] = sorted([*self._parties.get(after, ()), *numbers])

    def older(self, session: Session) -> int:
        """Return the number of waiting sessions that are older than ``session``."""
        return sum(bisect_left(numbers, session.number) for numbers in self._parties.values())

    def in_turn(self) -> Iterator[Session]:
        """Yield waiting sessions in the order in which the gate tries them.

        A party's second session follows the first sessions of all parties, and so on. Do not change
        the line during the iteration.
        """
        parties = self._parties
        order = sorted(parties, key=lambda p: (self._turns.get(p, 0), parties[p][0]))
        for place in range(max(map(len, parties.values()), default=0)):
            for party in order:
                if place < len(parties[party]):
                    yield self.sessions[parties[party][place]]

    def took_turn(self, session: Session, active: Counter[str | None]) -> None:
        """Move the party of an admitted session behind the others. ``active``: admitted sessions by
        tenant, without this one."""
        self._turn += 1
        self._turns[self._party(session.tenant)] = self._turn
        # An admitted newcomer becomes its own party, and has used its turn.
        self._turns[session.tenant] = self._turn
        if len(self._turns) > 2 * len(active) + 16:
            kept = {*active, session.tenant, _NEWCOMERS}
            self._turns = {p: turn for p, turn in self._turns.items() if p in kept}

    def _party(self, tenant: str | None) -> str | None:
        return tenant if tenant in self._active else _NEWCOMERS


def _remove(lists: dict[str | None, list[int]], name: str | None, number: int) -> None:
    numbers = lists[name]
    del numbers[bisect_left(numbers, number)]
    if not numbers:
        del lists[name]
