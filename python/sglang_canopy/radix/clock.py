"""The time of the requests: what eviction and the tiers call now."""

from __future__ import annotations


class RequestClock:
    """Largest arrival stamp seen, in seconds.

    Shared by the tree core and the tiers. It moves with the requests alone, so that every rank
    reads the same time at the same request.
    """

    __slots__ = ("now",)

    def __init__(self) -> None:
        self.now = 0.0

    def advance(self, time: float) -> float:
        """A request was stamped ``time``; the clock never goes back. Returns what it shows."""
        self.now = max(self.now, time)
        return self.now
