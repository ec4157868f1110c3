"""Removal of pages: expired, evicted for capacity or a quota, corrupt, or cleared."""

from __future__ import annotations

import math

import numpy as np

from sglang_canopy.disk.index import NO_ROW
from sglang_canopy.disk.index_writer import IndexWriter
from sglang_canopy.disk.state import StoreState

SWEEP_ROWS = 65_536
"""Rows scanned per ``sweep``. The next one continues behind them, unless this one reached its limit."""
SWEEP_PAGES = 256
"""Maximum expired pages removed by one ``sweep``."""
_EXPIRY_SCAN_INTERVAL_S = 1.0


class Eviction:
    """Remove pages. The caller holds the store's lock, except for ``sweep``."""

    def __init__(self, state: StoreState, index_writer: IndexWriter) -> None:
        self._state = state
        self._index_writer = index_writer
        self._next_scan_row = 0
        self._expiry_scanned_at = -math.inf

    def sweep(self, now: float | None = None, max_pages: int = SWEEP_PAGES) -> int:
        """Remove expired pages, at most ``max_pages``; see ``DiskStore.sweep``."""
        state = self._state
        if state.unavailable:
            return 0
        now = state.clock() if now is None else now
        with state.lock:
            removed_pages = self._remove_expired(now, max_pages)
        self._index_writer.flush()
        return removed_pages

    def make_room(self, now: float) -> bool:
        """Evict until a unit is available. Returns false if no page is evictable."""
        state = self._state
        if state.units.available_units:
            return True
        self._scan_at_intervals(now)
        while not state.units.available_units:
            victim = state.evictable_pages.victim(now)
            if victim is None:
                return False
            self.remove(
                victim.row, "trim" if victim.keep_tokens else "capacity", now, is_victim=True
            )
        return True

    def fit_quota(self, tenant: str | None, now: float) -> bool:
        """Evict pages of the tenant until one more page fits its quota. Returns false if that fails."""
        evictable = self._state.evictable_pages
        quota_bytes = evictable.quota_bytes(tenant)
        if quota_bytes is None or tenant is None:
            return True
        if evictable.tenant_bytes.get(tenant, 0) + evictable.page_bytes > quota_bytes:
            self._scan_at_intervals(now)
        while evictable.tenant_bytes.get(tenant, 0) + evictable.page_bytes > quota_bytes:
            victim = evictable.tenant_victim(tenant, now)
            if victim is None:
                return False
            self.remove(victim.row, "quota", now, is_victim=True)
        return True

    def remove(self, row: int, reason: str, now: float, *, is_victim: bool = False) -> int:
        """Remove a leaf page. ``is_victim``: the policy chose it. Returns the parent's row."""
        state, index = self._state, self._state.index
        leaf = state.evictable_pages.withdraw(row)
        state.evictable_pages.release_page(row, leaf, is_victim=is_victim)
        state.counters.evicted_pages[reason] += 1
        state.units.free((index.unit[row],))
        parent = index.remove(row)
        self._index_writer.mark_removed(row)
        if parent != NO_ROW:
            state.evictable_pages.refresh(parent, now)
        return parent

    def remove_subtree(self, row: int, reason: str, now: float) -> int:
        """Remove ``row`` and every page below it, leaves first. Returns the number removed."""
        index = self._state.index
        parents = index.arrays["parent"][: index.row_slots]
        order = np.argsort(parents, kind="stable")
        sorted_parents = parents[order]
        rows = [row]
        for parent in rows:  # which grows by the children of each
            first, end = np.searchsorted(sorted_parents, [parent, parent + 1])
            rows.extend(r for r in order[first:end].tolist() if index.key_of[r] is not None)
        for descendant in reversed(rows):
            self.remove(descendant, reason, now)
        return len(rows)

    def _scan_at_intervals(self, now: float) -> None:
        """Remove expired pages before others are evicted, at most once per ``_EXPIRY_SCAN_INTERVAL_S``."""
        if not 0 <= now - self._expiry_scanned_at < _EXPIRY_SCAN_INTERVAL_S:
            self._remove_expired(now, SWEEP_PAGES)

    def _remove_expired(self, now: float, max_pages: int) -> int:
        state, index = self._state, self._state.index
        row_slots = index.row_slots
        if self._next_scan_row >= row_slots or row_slots <= SWEEP_ROWS:
            self._next_scan_row = 0
        window = slice(self._next_scan_row, min(row_slots, self._next_scan_row + SWEEP_ROWS))
        expired = np.flatnonzero(
            (index.arrays["expires"][window] <= now) & (index.arrays["children"][window] == 0)
        )
        removed_pages = 0
        for row in (expired + self._next_scan_row).tolist():
            while row != NO_ROW and removed_pages < max_pages:
                if (
                    index.key_of[row] is None
                    or index.children[row]
                    or state.evictable_pages.is_locked(row)
                    or index.expires[row] > now
                ):
                    break
                row = self.remove(row, "ttl", now)
                removed_pages += 1
        if removed_pages < max_pages:
            self._next_scan_row = window.stop
        self._expiry_scanned_at = now
        return removed_pages
