"""Removal of pages: expired, evicted for capacity or a quota, corrupt, or cleared."""

from __future__ import annotations

import math

import numpy as np

from sglang_canopy.disk.index import NO_ROW
from sglang_canopy.disk.index_writer import IndexWriter
from sglang_canopy.disk.state import StoreState

SWEEP_ROWS = 65_536
"""Rows scanned per ``sweep``; the next continues behind them, unless this one reached its limit."""
SWEEP_PAGES = 256
_EXPIRE_EVERY_S = 1.0


class Eviction:
    """Remove pages. The caller holds the store's lock, except for ``sweep``."""

    def __init__(self, state: StoreState, index_writer: IndexWriter) -> None:
        self._state = state
        self._index_writer = index_writer
        self._cursor = 0
        self._last_expiry_scan = -math.inf

    def sweep(self, now: float | None = None, limit: int = SWEEP_PAGES) -> int:
        """Remove expired pages, at most ``limit``; see ``DiskStore.sweep``."""
        state = self._state
        if state.unavailable:
            return 0
        now = state.clock() if now is None else now
        with state.lock:
            removed = self._remove_expired(now, limit)
        self._index_writer.flush()
        return removed

    def make_room(self, now: float) -> bool:
        """Evict until a unit is available. Returns false if no page is evictable."""
        state = self._state
        if state.units.available:
            return True
        self._scan_at_intervals(now)
        while not state.units.available:
            victim = state.evictable.victim(now)
            if victim is None:
                return False
            self.remove(victim[0], "trim" if victim[1] else "capacity", now, chosen=True)
        return True

    def fit_quota(self, tenant: str | None, now: float) -> bool:
        """Evict pages of the tenant until one more page fits its quota. Returns false if that fails."""
        evictable = self._state.evictable
        quota = evictable.quota(tenant)
        if quota is None or tenant is None:
            return True
        if evictable.tenant_bytes.get(tenant, 0) + evictable.page_bytes > quota:
            self._scan_at_intervals(now)
        while evictable.tenant_bytes.get(tenant, 0) + evictable.page_bytes > quota:
            victim = evictable.victim_of(tenant, now)
            if victim is None:
                return False
            self.remove(victim[0], "quota", now, chosen=True)
        return True

    def remove(self, row: int, reason: str, now: float, *, chosen: bool = False) -> int:
        """Remove a leaf page. ``chosen``: the policy chose it. Returns the parent's row."""
        state, index = self._state, self._state.index
        leaf = state.evictable.withdraw(row)
        state.evictable.release_page(row, leaf, chosen=chosen)
        state.counters.evicted[reason] += 1
        state.units.free((index.unit[row],))
        parent = index.remove(row)
        self._index_writer.mark_removed(row)
        if parent != NO_ROW:
            state.evictable.refresh(parent, now)
        return parent

    def remove_subtree(self, row: int, reason: str, now: float) -> int:
        """Remove ``row`` and every page below it, leaves first. Returns the number removed."""
        index = self._state.index
        parents = index.arrays["parent"][: index.row_slots]
        order = np.argsort(parents, kind="stable")
        sorted_parents = parents[order]
        rows = [row]
        for parent in rows:  # which grows by the children of each
            low, high = np.searchsorted(sorted_parents, [parent, parent + 1])
            rows.extend(r for r in order[low:high].tolist() if index.keys[r] is not None)
        for each in reversed(rows):
            self.remove(each, reason, now)
        return len(rows)

    def _scan_at_intervals(self, now: float) -> None:
        """Remove expired pages before live ones are evicted, if the last scan is a while ago."""
        if not 0 <= now - self._last_expiry_scan < _EXPIRE_EVERY_S:
            self._remove_expired(now, SWEEP_PAGES)

    def _remove_expired(self, now: float, limit: int) -> int:
        state, index = self._state, self._state.index
        row_slots = index.row_slots
        if self._cursor >= row_slots or row_slots <= SWEEP_ROWS:
            self._cursor = 0
        window = slice(self._cursor, min(row_slots, self._cursor + SWEEP_ROWS))
        expired = np.flatnonzero(
            (index.arrays["expires"][window] <= now) & (index.arrays["children"][window] == 0)
        )
        removed = 0
        for row in (expired + self._cursor).tolist():
            while row != NO_ROW and removed < limit:
                if (
                    index.keys[row] is None
                    or index.children[row]
                    or state.evictable.is_locked(row)
                    or index.expires[row] > now
                ):
                    break
                row = self.remove(row, "ttl", now)
                removed += 1
        if removed < limit:
            self._cursor = window.stop
        self._last_expiry_scan = now
        return removed
