"""The sessions that wait to be admitted, and whose turn it is.

Parties take turns, and within one the oldest session comes first. A tenant with an active session
is a party; all tenants without one are a single party, so that inventing tenants for one session
each buys no more than one turn in the round.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from sglang_canopy.admission.session import Session

_NEWCOMERS = ""
"""The party of the tenants without an active session: no tenant's name is empty."""


class Line:
    """Waiting sessions. Every operation is of the order of the tenants or sessions in it."""

    def __init__(self) -> None:
        self.sessions: dict[int, Session] = {}
        """By number."""
        self._turns: dict[str | None, int] = {}
        self._turn = 0

    def __len__(self) -> int:
        return len(self.sessions)

    def add(self, session: Session) -> None:
        self.sessions[session.number] = session

    def discard(self, session: Session) -> None:
        self.sessions.pop(session.number, None)

    def in_turn(self, active: Counter[str | None]) -> Iterator[Session]:
        """Waiting sessions in the order in which they are to be tried. ``active``: admitted
        sessions by tenant.

        The round goes on while one party's sessions are tried: the next of the same party comes
        after the other parties' first ones.
        """
        parties: dict[str | None, list[Session]] = {}
        for number in sorted(self.sessions):
            session = self.sessions[number]
            parties.setdefault(self._party(session, active), []).append(session)
        rounds = max(map(len, parties.values()), default=0)
        order = sorted(parties, key=lambda p: (self._turns.get(p, 0), parties[p][0].number))
        for place in range(rounds):
            for party in order:
                if place < len(parties[party]):
                    yield parties[party][place]

    def took_turn(self, session: Session, active: Counter[str | None]) -> None:
        """``session`` is admitted: its party waits for the others now. Call before it counts
        among the active ones."""
        self._turn += 1
        party = self._party(session, active)
        self._turns[party] = self._turn
        # A newcomer admitted is a party of its own from now on, and has had its turn.
        self._turns[session.tenant] = self._turn
        if len(self._turns) > 2 * len(active) + 16:
            kept = {*active, session.tenant, _NEWCOMERS}
            self._turns = {p: turn for p, turn in self._turns.items() if p in kept}

    @staticmethod
    def _party(session: Session, active: Counter[str | None]) -> str | None:
        return session.tenant if active[session.tenant] else _NEWCOMERS
