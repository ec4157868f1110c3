"""Shared state of the disk store's parts."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from sglang_canopy.disk.content import Content
from sglang_canopy.disk.evictable_pages import EvictablePages
from sglang_canopy.disk.idle_namespaces import IdleNamespaces
from sglang_canopy.disk.index import PageIndex
from sglang_canopy.disk.journal import Journal
from sglang_canopy.disk.segments import SegmentFiles
from sglang_canopy.disk.store_counters import Faults, StoreCounters
from sglang_canopy.disk.units import UnitAllocator
from sglang_canopy.ttl.table import TTLTable


@dataclass(slots=True, eq=False)
class StoreState:
    """State of one store. ``lock`` guards all of it except the page I/O of ``segments`` and the
    ``journal``. Acquire the journal's own lock before ``lock``."""

    capacity_bytes: int
    clock: Callable[[], float]
    content: Content
    counters: StoreCounters
    faults: Faults
    index: PageIndex
    evictable_pages: EvictablePages
    units: UnitAllocator
    ttl: TTLTable
    idle_namespaces: IdleNamespaces
    lock: threading.RLock = field(default_factory=threading.RLock)
    unavailable: str | None = "not open yet"
    """Reason why the store is unavailable; ``None`` while it works."""
    segments: SegmentFiles = field(init=False)
    """Set, like ``journal``, by the first successful claim."""
    journal: Journal = field(init=False)
    index_generation: int = 0
    """Number of index replacements. Batches that began before the latest one are dropped."""

    def forget_pages(self) -> None:
        """Continue without pages. No quota is used, and the policy keeps its learnt state."""
        self.index_generation += 1
        self.index = PageIndex()
        self.evictable_pages = self.evictable_pages.make_empty(self.index)
        self.units = UnitAllocator(self.units.max_units)
