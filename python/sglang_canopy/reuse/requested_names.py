"""Counts requests for category names that are not in the table. Bounded; old counts fade."""

from __future__ import annotations


class RequestedNames:
    """Requests by name, for at most ``most`` names: beyond that, all counts are halved."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._requested: dict[str, tuple[int, float]] = {}
        """Number of requests, and the time of the last request."""

    def __len__(self) -> int:
        return len(self._requested)

    def ask(self, name: str, now: float) -> int:
        """Count a request for ``name`` at ``now``. Return its requests, at most one per time."""
        count, last = self._requested.get(name, (0, None))
        if last is None or last < now:
            count += 1
        self._requested[name] = (count, now)
        if len(self._requested) > self._most:
            self._requested = {n: (c // 2, t) for n, (c, t) in self._requested.items() if c > 1}
        return count

    def forget(self, name: str) -> int:
        """Drop ``name``, which is in the table now. Return its earlier requests."""
        count, _ = self._requested.pop(name, (0, 0.0))
        return max(0, count - 1)
