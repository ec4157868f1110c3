"""Which conversations wait for a child whose request is under way: an answer may take minutes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sglang_canopy.radix.live_request import LiveRequest

AT_MOST_S = 600.0
"""A request that has not ended by then was aborted, or nobody should wait for it."""
EVERY_S = 15.0
"""How often those who wait are named again."""
PER_TENANT, IN_ALL = 64, 1024
"""Requests that are remembered; the others' parents are kept from arrival and answer alone."""


class UnderWay:
    """The requests of children between arrival and answer. Time is the requests' clock."""

    def __init__(self) -> None:
        self._began: dict[int, tuple[str | None, str, float]] = {}
        """By a request's number, in order of arrival: tenant, parent, time."""
        self._of: Counter[str | None] = Counter()
        self._named = 0.0

    def __len__(self) -> int:
        return len(self._began)

    def began(self, request: LiveRequest) -> None:
        """A child's request has arrived."""
        tenant, parent = request.tenant, request.parent
        if parent is None or len(self) >= IN_ALL or self._of[tenant] >= PER_TENANT:
            return
        self._began[request.number] = tenant, parent, request.time
        self._of[tenant] += 1

    def ended(self, number: int) -> None:
        """It is answered."""
        tenant, _, _ = self._began.pop(number, (None, "", 0.0))
        if tenant in self._of:
            self._of[tenant] -= 1
            if not self._of[tenant]:
                del self._of[tenant]

    def waiting(self, now: float) -> Iterator[tuple[str | None, str]]:
        """Tenant and name of whoever waits, every ``EVERY_S`` seconds; nobody in between."""
        if now - self._named < EVERY_S:
            return
        self._named = now
        for number in [n for n, (_, _, at) in self._began.items() if now - at > AT_MOST_S]:
            self.ended(number)
        yield from dict.fromkeys((tenant, parent) for tenant, parent, _ in self._began.values())

    def clear(self) -> None:
        """The tree is being emptied."""
        self._began.clear()
        self._of.clear()
