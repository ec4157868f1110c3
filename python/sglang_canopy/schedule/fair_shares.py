"""Fair shares between tenants, in seconds of work.

Start-time fair queueing (Goyal, Vin, Cheng, SIGCOMM 1996) with predicted seconds as packet lengths:
the turn with the least work received is served next. Like deficit round robin, it keeps two
backlogged turns within one request of each other; unlike it, it needs no quantum and tolerates
service out of order.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from heapq import nlargest

from sglang_canopy.tenant import Party, Vouched

OWN_TURNS = 64
"""Maximum parties with a separate turn: those served most, with decay."""
REMEMBERED = 256
"""Parties whose served work is tracked."""
FADE_S = 600.0
"""Halve all tracked work after this many seconds of served work."""
_FORGOTTEN_S = 1e-3
"""A party with less work is forgotten."""
PUBLIC: str | None = None
"""Tenant of requests without a tenant name."""


class _SharedTurn:
    """Turn shared by all parties without a separate turn."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __repr__(self) -> str:
        return self._name


REST, VOUCHED_REST = _SharedTurn("REST"), _SharedTurn("VOUCHED_REST")
Turn = Hashable


class FairShares:
    """Work received by each turn.

    A client can use any number of tenant names, so a name alone is worth little. Each tenant that a
    gateway vouches for has a separate turn; all requests without a voucher share ``REST`` while
    there are vouched requests. If no request is vouched for, a new name shares ``REST``, and gets a
    separate turn once it has been served. That is fair between clients that use one name each, but
    no protection from a client that uses many.
    """

    def __init__(self) -> None:
        self._served_s: dict[Party, float] = {}
        """Party -> seconds of work, decayed."""
        self._since_fade = 0.0
        self._own_turns: set[Party] = {PUBLIC}
        self._vouched = False
        """Whether a vouched party was served recently."""
        self._next_start: dict[Turn, float] = {}
        """Turn -> virtual start time, in seconds."""
        self._virtual_time = 0.0
        """Virtual start time of the last request served."""

    def turn_of(self, party: Party) -> Turn:
        if party in self._own_turns:
            return party
        if not isinstance(party, Vouched):
            return REST
        if self._vouched and len(self._own_turns) >= OWN_TURNS:
            return VOUCHED_REST
        return party

    def starts(self, turns: Iterable[Turn]) -> dict[Turn, float]:
        """Return the virtual start time of each turn's next request; ties go by order."""
        return {turn: max(self._next_start.get(turn, 0.0), self._virtual_time) for turn in turns}

    def charge(self, party: Party, turn: Turn, seconds: float) -> None:
        """Charge an admitted request of ``party`` to ``turn``."""
        start = max(self._next_start.get(turn, 0.0), self._virtual_time)
        self._virtual_time = max(self._virtual_time, start)
        self._next_start[turn] = start + seconds
        # Turns at or below the floor start at the floor anyway.
        if len(self._next_start) > 2 * OWN_TURNS:
            self._next_start = {
                t: work for t, work in self._next_start.items() if work > self._virtual_time
            }
        self._remember(party, seconds)

    def _remember(self, party: Party, seconds: float) -> None:
        self._served_s[party] = self._served_s.get(party, 0.0) + seconds
        self._since_fade += seconds
        if self._since_fade > FADE_S:
            self._since_fade = 0.0
            self._served_s = {
                name: work / 2 for name, work in self._served_s.items() if work > _FORGOTTEN_S
            }
            self._vouched = any(isinstance(name, Vouched) for name in self._served_s)
            self._own_turns = self._most_served()
        if len(self._served_s) > REMEMBERED:  # several at once: each new name would cost a search
            kept = nlargest(REMEMBERED - OWN_TURNS, self._served_s, key=self._importance)
            self._served_s = {name: self._served_s[name] for name in kept}
        if isinstance(party, Vouched):
            self._vouched = True
        if party not in self._own_turns or (self._vouched and PUBLIC in self._own_turns):
            self._own_turns = self._most_served()

    def _most_served(self) -> set[Party]:
        """Return the parties with a separate turn."""
        served = [name for name in self._served_s if isinstance(name, Vouched) or not self._vouched]
        most = set(nlargest(OWN_TURNS, served, key=self._importance))
        return most if self._vouched else {*most, PUBLIC}

    def _importance(self, party: Party) -> tuple[bool, float, str]:
        vouched = isinstance(party, Vouched)
        name = party.tenant if isinstance(party, Vouched) else party
        return vouched, self._served_s[party], name or ""


def first(starts: Mapping[Turn, float]) -> Turn:
    """Return the turn to serve next."""
    return min(starts, key=starts.__getitem__)
