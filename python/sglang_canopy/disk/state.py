"""What the parts of the disk store share."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from sglang_canopy.disk.content import Content
from sglang_canopy.disk.counters import Faults, StoreCounters
from sglang_canopy.disk.evictable import EvictablePages
from sglang_canopy.disk.index import PageIndex
from sglang_canopy.disk.journal import Journal
from sglang_canopy.disk.segments import SegmentFiles
from sglang_canopy.disk.units import UnitAllocator
from sglang_canopy.ttl.table import TTLTable


@dataclass(slots=True, eq=False)
class StoreState:
    """``lock`` guards everything but the page I/O of ``segments`` and the ``journal``.

    The journal has a lock of its own, which comes before ``lock`` wherever both are taken.
    """

    capacity_bytes: int
    clock: Callable[[], float]
    content: Content
    counters: StoreCounters
    faults: Faults
    index: PageIndex
    evictable: EvictablePages
    units: UnitAllocator
    ttl: TTLTable
    lock: threading.RLock = field(default_factory=threading.RLock)
    unavailable: str | None = "not open yet"
    """Why nothing is stored or found; ``None`` in working order."""
    segments: SegmentFiles = field(init=False)
    """This and ``journal`` are there once the folder was taken for the first time."""
    journal: Journal = field(init=False)
    opening: int = 0
    """Number of times that the index was begun. A batch of an earlier one is dropped."""
    _clock_jumps: int = 0

    def notice_clock_jumps(self) -> None:
        """Count the jumps of the wall clock since the last call as faults."""
        jumps = getattr(self.clock, "jumps", 0)
        if jumps > self._clock_jumps:
            self.faults.note("clock", "the wall clock was set", jumps - self._clock_jumps)
            self._clock_jumps = jumps

    def replace_index(self) -> None:
        """Begin with an empty index; its pages left ``evictable`` before."""
        self.opening += 1
        self.index = PageIndex()
        self.evictable.index = self.index
