"""Which units of the segment files are free."""

from __future__ import annotations

from collections.abc import Iterable


class UnitAllocator:
    """Each holds one page. Not thread-safe: the store's lock guards it."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        """Units that may exist."""
        self.top = 0
        """Units that were ever handed out: all lie below this number."""
        self.used = 0
        self.growth_allowed = True
        """False while the disk is full: only units that exist are handed out."""
        self._free: list[int] = []
        self._readers: dict[int, int] = {}
        self._freed_while_read: set[int] = set()
        self._missing: list[int] = []
        """Handed out once, but the disk had no room behind them."""

    @property
    def available(self) -> int:
        """Units that ``allocate`` can give now."""
        fresh = max(0, self.limit - self.top) if self.growth_allowed else 0
        return len(self._free) + fresh

    def allocate(self) -> int:
        """A unit; the caller checked ``available``."""
        assert self.available, "no unit is free"
        self.used += 1
        if self._free:
            return self._free.pop()
        self.top += 1
        return self.top - 1

    def free(self, units: Iterable[int]) -> None:
        """Free these. One that is being read is handed out again only after ``end_read``."""
        for unit in units:
            self.used -= 1
            if unit in self._readers:
                self._freed_while_read.add(unit)
            else:
                self._free.append(unit)

    def disk_full(self, unit: int) -> None:
        """The disk is full: this one could not be written, and no new ones can be."""
        self.used -= 1
        self._missing.append(unit)
        self.growth_allowed = False

    def allow_growth(self) -> None:
        """Try again whether the disk has room."""
        self.growth_allowed = True
        self._free.extend(self._missing)
        self._missing.clear()

    def begin_read(self, units: Iterable[int]) -> None:
        """A reader begins."""
        for unit in units:
            self._readers[unit] = self._readers.get(unit, 0) + 1

    def end_read(self, units: Iterable[int]) -> None:
        """The reader is done."""
        for unit in units:
            left = self._readers[unit] - 1
            if left:
                self._readers[unit] = left
                continue
            del self._readers[unit]
            if unit in self._freed_while_read:
                self._freed_while_read.discard(unit)
                self._free.append(unit)

    def adopt(self, used: set[int]) -> int:
        """Start from what an index says is used. Returns the free units below ``top``."""
        self.top = max(used) + 1 if used else 0
        self.used = len(used)
        self._free = [u for u in range(self.top - 1, -1, -1) if u not in used]
        return len(self._free)

    def shrink(self) -> None:
        """After ``adopt`` with a smaller limit: free units beyond it no longer exist."""
        self._free = [u for u in self._free if u < self.limit]
        self.top = min(self.top, self.limit)

    def retire(self) -> None:
        """A page moved out of a unit beyond the limit."""
        self.used -= 1

    def unused_units(self) -> set[int]:
        """For checks."""
        return set(self._free) | self._freed_while_read | set(self._missing)
