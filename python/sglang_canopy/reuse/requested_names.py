"""How often categories without a place in the table were asked for. Bounded, and old counts fade."""

from __future__ import annotations


class RequestedNames:
    """Requests by name, for at most ``most`` names: when there are more, all counts are halved."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._requested: dict[str, tuple[int, float]] = {}
        """Requests, and the time of the last one."""

    def __len__(self) -> int:
        return len(self._requested)

    def ask(self, name: str, now: float) -> int:
        """A request at ``now`` asks for ``name``. Returns how many did, counted once a time."""
        count, last = self._requested.get(name, (0, None))
        if last is None or last < now:
            count += 1
        self._requested[name] = (count, now)
        if len(self._requested) > self._most:
            self._requested = {n: (c // 2, t) for n, (c, t) in self._requested.items() if c > 1}
        return count

    def forget(self, name: str) -> int:
        """``name`` has a place now. Returns how many requests asked for it before this one."""
        count, _ = self._requested.pop(name, (0, 0.0))
        return max(0, count - 1)
