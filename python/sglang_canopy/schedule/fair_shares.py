"""Fair shares between tenants, in seconds of work.

Start-time fair queueing (Goyal, Vin, Cheng, SIGCOMM 1996) with predicted seconds as packet lengths:
the turn with the least work received is served next. Like deficit round robin, it keeps two
backlogged turns within one request of each other; unlike it, it needs no quantum and tolerates
service out of order.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from heapq import nlargest

OWN_TURNS = 64
"""Limit of tenants with their own turn: those served most, with decay."""
REMEMBERED = 256
"""Tenants whose served work is tracked."""
FADE_S = 600.0
"""Halve all tracked work after this many seconds of served work."""
PUBLIC: str | None = None
"""Tenant of requests that name none; always has its own turn."""


class _SharedTurn:
    """Turn shared by all tenants without their own."""

    def __repr__(self) -> str:
        return "REST"


REST = _SharedTurn()
Turn = Hashable


class FairShares:
    """Work received by each turn.

    Tenants not served before share ``REST``, so a client that invents tenant names gains nothing
    and does not slow down known tenants.
    """

    def __init__(self) -> None:
        self._served_s: dict[str | None, float] = {}
        """Tenant -> seconds of work, decayed."""
        self._since_fade = 0.0
        self._own_turns: set[str | None] = {PUBLIC}
        self._next_start: dict[Turn, float] = {}
        """Turn -> virtual start time, in seconds."""
        self._virtual_time = 0.0
        """Virtual start time of the last request served."""

    def turn_of(self, tenant: str | None) -> Turn:
        return tenant if tenant in self._own_turns else REST

    def starts(self, turns: Iterable[Turn]) -> dict[Turn, float]:
        """Return the virtual start time of each turn's next request; ties go by order."""
        return {turn: max(self._next_start.get(turn, 0.0), self._virtual_time) for turn in turns}

    def charge(self, tenant: str | None, turn: Turn, seconds: float) -> None:
        """Charge an admitted request of ``tenant`` to ``turn``."""
        start = max(self._next_start.get(turn, 0.0), self._virtual_time)
        self._virtual_time = max(self._virtual_time, start)
        self._next_start[turn] = start + seconds
        # Turns at or below the floor start at the floor anyway.
        if len(self._next_start) > 2 * OWN_TURNS:
            self._next_start = {
                t: work for t, work in self._next_start.items() if work > self._virtual_time
            }
        self._remember(tenant, seconds)

    def _remember(self, tenant: str | None, seconds: float) -> None:
        self._served_s[tenant] = self._served_s.get(tenant, 0.0) + seconds
        self._since_fade += seconds
        if self._since_fade > FADE_S:
            self._since_fade = 0.0
            self._served_s = {name: work / 2 for name, work in self._served_s.items()}
        if len(self._served_s) > REMEMBERED:
            least = min(self._served_s, key=lambda name: (self._served_s[name], name or ""))
            del self._served_s[least]
        if len(self._served_s) <= OWN_TURNS:
            self._own_turns = {*self._served_s, PUBLIC}
        elif tenant not in self._own_turns:
            most = nlargest(
                OWN_TURNS, self._served_s.items(), key=lambda row: (row[1], row[0] or "")
            )
            self._own_turns = {*(name for name, _ in most), PUBLIC}


def first(starts: Mapping[Turn, float]) -> Turn:
    """Return the turn to serve next."""
    return min(starts, key=starts.__getitem__)
