"""Shared state of the disk store's parts."""

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
    """``lock`` guards all state except the page I/O of ``segments`` and the ``journal``.

    Acquire the journal's own lock before ``lock``.
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
    """Reason why the store is unavailable; ``None`` while it works."""
    segments: SegmentFiles = field(init=False)
    """Set, like ``journal``, by the first successful claim."""
    journal: Journal = field(init=False)
    opening: int = 0
    """Number of index replacements; batches from before one are dropped."""
    _clock_jumps: int = 0

    def notice_clock_jumps(self) -> None:
        """Record the wall clock's jumps since the last call as faults."""
        jumps = getattr(self.clock, "jumps", 0)
        if jumps > self._clock_jumps:
            self.faults.note("clock", "the wall clock was set", jumps - self._clock_jumps)
            self._clock_jumps = jumps

    def replace_index(self) -> None:
        """Install an empty index. The caller removed the old pages from ``evictable``."""
        self.opening += 1
        self.index = PageIndex()
        self.evictable.index = self.index
