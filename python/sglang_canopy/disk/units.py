"""Allocation of units in the segment files."""

from __future__ import annotations

from collections.abc import Iterable


class UnitAllocator:
    """Allocate units of one page each. Not thread-safe: the store's lock guards it."""

    def __init__(self, max_units: int) -> None:
        self.max_units = max_units
        self.end_unit = 0
        """One above the highest unit ever allocated."""
        self.used_units = 0
        self.may_grow = True
        """False while the disk is full: only existing units are allocated."""
        self._free_units: list[int] = []
        self._reader_counts: dict[int, int] = {}
        self._freed_while_read: set[int] = set()
        self._unwritten_units: list[int] = []
        """Units that were allocated, but not written because the disk was full."""

    @property
    def available_units(self) -> int:
        """Number of units that can be allocated now."""
        new_units = max(0, self.max_units - self.end_unit) if self.may_grow else 0
        return len(self._free_units) + new_units

    def allocate(self) -> int:
        """Return a free unit. Check ``available_units`` first."""
        assert self.available_units, "no unit is free"
        self.used_units += 1
        if self._free_units:
            return self._free_units.pop()
        self.end_unit += 1
        return self.end_unit - 1

    def free(self, units: Iterable[int]) -> None:
        """Free ``units``. A unit being read is reused only after ``end_read``."""
        for unit in units:
            self.used_units -= 1
            if unit in self._reader_counts:
                self._freed_while_read.add(unit)
            else:
                self._free_units.append(unit)

    def record_full_disk(self, unit: int) -> None:
        """Record that ``unit`` could not be written because the disk is full; stop growth."""
        self.used_units -= 1
        self._unwritten_units.append(unit)
        self.may_grow = False

    def allow_growth(self) -> None:
        """Allow growth again, including the units that could not be written."""
        self.may_grow = True
        self._free_units.extend(self._unwritten_units)
        self._unwritten_units.clear()

    def begin_read(self, units: Iterable[int]) -> None:
        """Protect ``units`` from reuse while they are read."""
        for unit in units:
            self._reader_counts[unit] = self._reader_counts.get(unit, 0) + 1

    def end_read(self, units: Iterable[int]) -> None:
        """Undo one ``begin_read``."""
        for unit in units:
            remaining_readers = self._reader_counts[unit] - 1
            if remaining_readers:
                self._reader_counts[unit] = remaining_readers
                continue
            del self._reader_counts[unit]
            if unit in self._freed_while_read:
                self._freed_while_read.discard(unit)
                self._free_units.append(unit)

    def adopt(self, used_units: set[int]) -> None:
        """Initialise from the used units of a loaded index."""
        self.end_unit = max(used_units) + 1 if used_units else 0
        self.used_units = len(used_units)
        self._free_units = [u for u in range(self.end_unit - 1, -1, -1) if u not in used_units]

    def shrink(self) -> None:
        """Drop free units above the limit, after ``adopt`` with a reduced limit."""
        self._free_units = [u for u in self._free_units if u < self.max_units]
        self.end_unit = min(self.end_unit, self.max_units)

    def retire(self) -> None:
        """Release a unit above the limit whose page was moved."""
        self.used_units -= 1
