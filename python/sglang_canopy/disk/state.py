"""Shared state of the disk store's parts."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from sglang_canopy.disk.content import Content
from sglang_canopy.disk.counters import Faults, StoreCounters
from sglang_canopy.disk.evictable import EvictablePages
from sglang_canopy.disk.index import PageIndex
from sglang_canopy.disk.journal import Journal
from sglang_canopy.disk.neighbours import Neighbours
from sglang_canopy.disk.segments import SegmentFiles
from sglang_canopy.disk.units import UnitAllocator
from sglang_canopy.policy.base import Policy
from sglang_canopy.ttl.table import TTLTable

SLICE = 4096
"""Entries released at once: about a millisecond in which no other thread runs Python."""


class Retired:
    """Lists, dicts and sets, and a policy, without other references."""

    def __init__(
        self, index: object, containers: Iterable[Any], policy: Policy, stays_s: Any
    ) -> None:
        self._index = index  # its arrays are released last, with this object
        self._containers = [*containers]
        self._policy = policy
        self._stays_s = stays_s

    def next_stays(self) -> Any:
        """Return seconds on disk of pages that were not yet returned; empty at the end."""
        stays_s, self._stays_s = self._stays_s[:SLICE], self._stays_s[SLICE:]
        return stays_s

    def release(self) -> bool:
        """Release one slice. Returns whether all is released."""
        if not self._containers:
            return self._policy.release(SLICE)
        container = self._containers[-1]
        if isinstance(container, list):
            del container[-SLICE:]
        else:
            remove = container.popitem if isinstance(container, dict) else container.pop
            for _ in range(min(SLICE, len(container))):
                remove()
        if not container:
            self._containers.pop()
        return False


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
    neighbours: Neighbours
    lock: threading.RLock = field(default_factory=threading.RLock)
    unavailable: str | None = "not open yet"
    """Reason why the store is unavailable; ``None`` while it works."""
    segments: SegmentFiles = field(init=False)
    """Set, like ``journal``, by the first successful claim."""
    journal: Journal = field(init=False)
    opening: int = 0
    """Number of index replacements. Batches that began before the latest one are dropped."""
    retired: list[Retired] = field(default_factory=list)
    """Memory of earlier indexes, for ``release_retired``."""
    _clock_jumps: int = 0

    def notice_clock_jumps(self) -> None:
        """Record the wall clock's jumps since the last call as faults."""
        jumps = getattr(self.clock, "jumps", 0)
        if jumps > self._clock_jumps:
            self.faults.note("clock", "the wall clock was set", jumps - self._clock_jumps)
            self._clock_jumps = jumps

    def forget_pages(self, *leftovers: Any) -> None:
        """Continue without pages, in constant time. No quota is used, and the policy keeps its
        learnt state. ``leftovers``: other containers to release later."""
        old, evictable = self.index, self.evictable
        self.opening += 1
        self.index = PageIndex()
        self.evictable = evictable.without_pages(self.index)
        containers = (*leftovers, *old.containers(), *evictable.containers())
        stays_s = old.stays_s(self.clock())
        self.retired.append(Retired(old, containers, evictable.policy, stays_s))

    def release_retired(self) -> None:
        """Release the memory of forgotten pages, and count their time on disk. Needs no lock; not
        for the scheduler's thread."""
        while True:
            with self.lock:
                if not self.retired:
                    return
                one = self.retired[-1]
                stays_s = one.next_stays()
                if len(stays_s):
                    self.counters.stayed(stays_s)
                elif one.release():
                    self.retired.pop()
