"""Whose turn it is: tenants share the engine in seconds of work, however many names they use.

Start-time fair queueing (Goyal, Vin, Cheng, SIGCOMM 1996) with predicted seconds as lengths: the
turn whose work so far is least is next. Like deficit round robin it lets two turns that both have
work drift apart by no more than a request of each; unlike it, it needs no quantum, and what was
served out of order is simply counted.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from heapq import nlargest

OWN_TURNS = 64
"""Tenants with a turn of their own: those that were served most lately."""
REMEMBERED = 256
"""Tenants whose served work is remembered."""
FADE_S = 600.0
"""After so many seconds of served work, all that was served counts half."""
PUBLIC: str | None = None
"""The tenant of requests that name none; it always has a turn of its own."""


class _Rest:
    """The turn that all other tenants share."""

    def __repr__(self) -> str:
        return "REST"


REST = _Rest()
Turn = Hashable


class FairShares:
    """What each turn has been served. A name nobody was served under shares ``REST``: whoever
    invents names waits with the other inventions, and takes nothing from those who are known."""

    def __init__(self) -> None:
        self._served: dict[str | None, float] = {}
        """Tenant -> seconds of work, fading."""
        self._since_fade = 0.0
        self._own: set[str | None] = {PUBLIC}
        self._work: dict[Turn, float] = {}
        """Turn -> virtual seconds, where its next request starts."""
        self._floor = 0.0
        """Where the last request that was served started."""

    def turn_of(self, tenant: str | None) -> Turn:
        """The turn under which ``tenant`` is served now."""
        return tenant if tenant in self._own else REST

    def starts(self, turns: Iterable[Turn]) -> dict[Turn, float]:
        """Where the next request of each turn would start; the least is next. Ties go by order."""
        return {turn: max(self._work.get(turn, 0.0), self._floor) for turn in turns}

    def charge(self, tenant: str | None, turn: Turn, seconds: float) -> None:
        """A request of ``tenant`` was let in under ``turn``."""
        start = max(self._work.get(turn, 0.0), self._floor)
        self._floor = max(self._floor, start)
        self._work[turn] = start + seconds
        # A turn behind the floor starts there anyway: nothing is forgotten with it.
        if len(self._work) > 2 * OWN_TURNS:
            self._work = {t: work for t, work in self._work.items() if work > self._floor}
        self._remember(tenant, seconds)

    def _remember(self, tenant: str | None, seconds: float) -> None:
        self._served[tenant] = self._served.get(tenant, 0.0) + seconds
        self._since_fade += seconds
        if self._since_fade > FADE_S:
            self._since_fade = 0.0
            self._served = {name: work / 2 for name, work in self._served.items()}
        if len(self._served) > REMEMBERED:
            least = min(self._served, key=lambda name: (self._served[name], name or ""))
            del self._served[least]
        if len(self._served) <= OWN_TURNS:
            self._own = {*self._served, PUBLIC}
        elif tenant not in self._own:
            most = nlargest(OWN_TURNS, self._served.items(), key=lambda row: (row[1], row[0] or ""))
            self._own = {*(name for name, _ in most), PUBLIC}


def first(starts: Mapping[Turn, float]) -> Turn:
    """The turn that is next of those in ``starts``."""
    return min(starts, key=starts.__getitem__)
