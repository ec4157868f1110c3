"""Write pages: make room, write the data, then update the index."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from sglang_canopy.disk.content import PageBuffers, raw_key
from sglang_canopy.disk.eviction import Eviction
from sglang_canopy.disk.index import NO_ROW
from sglang_canopy.disk.index_writer import IndexWriter
from sglang_canopy.disk.lifetimes import Lifetimes, clamp_to_now
from sglang_canopy.disk.page import PageMeta, path_fields
from sglang_canopy.disk.state import StoreState
from sglang_canopy.disk.store_counters import fault_kind
from sglang_canopy.disk.units import UnitAllocator

GROWTH_RETRY_S = 30.0
"""Seconds after a full disk before the files may grow again."""


@dataclass(slots=True)
class _PageWrite:
    """One page offered by a batch."""

    key: bytes
    parent: bytes | None
    meta: PageMeta
    views: list[memoryview] = field(default_factory=list)
    """Empty if the page was on disk already."""
    unit: int = -1


@dataclass(slots=True)
class _Batch:
    """Pages with a unit; no lock is held while their data is written."""

    index_generation: int
    """Value of ``StoreState.index_generation`` at the start of the batch."""
    units: UnitAllocator
    placed_pages: list[_PageWrite] = field(default_factory=list)
    placed_keys: set[bytes] = field(default_factory=set)
    locked_parents: list[int] = field(default_factory=list)


class PageWriter:
    """Write batches of pages."""

    def __init__(
        self,
        state: StoreState,
        index_writer: IndexWriter,
        lifetimes: Lifetimes,
        eviction: Eviction,
        monotonic: Callable[[], float],
    ) -> None:
        self._state = state
        self._index_writer = index_writer
        self._lifetimes = lifetimes
        self._eviction = eviction
        self._monotonic = monotonic
        self._no_growth_until = 0.0

    def write(
        self,
        keys: Sequence[str],
        pages: Sequence[PageBuffers],
        metas: Sequence[PageMeta],
        parents: Sequence[str | None],
    ) -> list[bool]:
        """Store pages, parents first; see ``DiskStore.write``."""
        state, content = self._state, self._state.content
        if state.unavailable:
            state.counters.refused_pages["unavailable"] += len(keys)
            return [False] * len(keys)
        offered = [
            _PageWrite(raw_key(key), None if parent is None else raw_key(parent), meta)
            for key, parent, meta in zip(keys, parents, metas, strict=True)
        ]
        self._view_absent(offered, pages)
        full_faults_before, now = state.counters.faults["full"], state.clock()
        with state.lock:
            if state.unavailable:  # since the first check
                state.counters.refused_pages["unavailable"] += len(keys)
                return [False] * len(keys)
            batch = _Batch(state.index_generation, state.units)
            segments = state.segments
            self._retry_growth()
            self._use_present(offered, now)
            on_disk = [self._place_if_absent(page, batch, now) for page in offered]
        try:
            errors = segments.write([(page.unit, page.views) for page in batch.placed_pages])
            checksums = [content.checksum(page.key, page.views) for page in batch.placed_pages]
        except BaseException:
            with state.lock:
                self._discard_batch(batch, now)
            raise
        with state.lock:
            self._enter_batch(batch, errors, checksums, now)
            on_disk = [
                was_on_disk or page.key in state.index.row_of
                for was_on_disk, page in zip(on_disk, offered, strict=True)
            ]
        committed = self._index_writer.flush()
        if (
            state.counters.faults["full"] > full_faults_before
            and state.idle_namespaces.remove_oldest()
        ):
            with state.lock:
                state.units.allow_growth()
            committed = self._index_writer.flush()
        return on_disk if committed else [False] * len(keys)

    def _view_absent(self, offered: Sequence[_PageWrite], pages: Sequence[PageBuffers]) -> None:
        """Set the views of pages that are not on disk, and make room for them in the folder."""
        state, content = self._state, self._state.content
        with state.lock:
            absent = [i for i, page in enumerate(offered) if page.key not in state.index.row_of]
            pages_after = state.units.used_units + len(absent)
        for i in absent:
            offered[i].views = content.views(pages[i])
        if absent:
            state.idle_namespaces.make_room(pages_after * content.page_bytes)

    def _use_present(self, offered: Sequence[_PageWrite], now: float) -> None:
        """Record a use of the offered pages that are on disk already."""
        rows = self._state.index.row_of
        present = [page for page in offered if page.key in rows]
        self._state.counters.present_pages += len(present)
        for _, group in itertools.groupby(present, lambda page: path_fields(page.meta)):
            pages = list(group)
            path = list(dict.fromkeys(rows[page.key] for page in pages))
            self._lifetimes.record_use(path, pages[0].meta, now, adds_hit=False)

    def _place_if_absent(self, page: _PageWrite, batch: _Batch, now: float) -> bool:
        """Allocate a unit for a page that is not on disk, if permitted. Returns whether the page was
        on disk already."""
        state = self._state
        if page.key in state.index.row_of:
            return True
        if page.key in batch.placed_keys:
            return False  # duplicate in this batch
        if not page.views:
            state.counters.refused_pages["no-prefix"] += 1  # evicted since the batch began
            return False
        if self._place(page, batch, now):
            batch.placed_keys.add(page.key)
            batch.placed_pages.append(page)
        return False

    def _place(self, page: _PageWrite, batch: _Batch, now: float) -> bool:
        """Allocate a unit for a page, evicting if needed. Returns false if the page is refused."""
        state, counters, meta = self._state, self._state.counters, page.meta
        if page.parent is not None and page.parent not in batch.placed_keys:
            row = state.index.row_of.get(page.parent)
            if row is None:
                counters.refused_pages["no-prefix"] += 1
                return False
            state.evictable_pages.lock_parent(row)
            batch.locked_parents.append(row)
        if not self._eviction.fit_quota(meta.tenant, now):
            counters.refused_pages["quota"] += 1
            return False
        if not self._eviction.make_room(now):
            counters.refused_pages["capacity"] += 1
            return False
        state.evictable_pages.charge_tenant(meta.tenant)
        page.unit = state.units.allocate()
        return True

    def _discard_batch(self, batch: _Batch, now: float) -> None:
        """Undo the allocations, charges and locks of a batch."""
        state = self._state
        batch.units.free(page.unit for page in batch.placed_pages)
        if batch.index_generation == state.index_generation:
            for page in batch.placed_pages:
                state.evictable_pages.refund_tenant(page.meta.tenant)
            for row in batch.locked_parents:
                state.evictable_pages.unlock_parent(row, now)

    def _enter_batch(
        self, batch: _Batch, errors: Sequence[OSError | None], checksums: Sequence[int], now: float
    ) -> None:
        """Insert the pages whose data was written without an error into the index."""
        state = self._state
        if batch.index_generation != state.index_generation:  # all pages and charges were removed
            self._discard_batch(batch, now)
            return
        new_rows = []
        for page, checksum, error in zip(batch.placed_pages, checksums, errors, strict=True):
            if error is None:
                row = self._enter(page, checksum, now)
                if row != NO_ROW:
                    new_rows.append(row)
                    continue
                state.units.free((page.unit,))
            else:
                self._handle_write_error(error, page.unit)
            state.evictable_pages.refund_tenant(page.meta.tenant)
        for row in new_rows:
            state.evictable_pages.refresh(row, now)
        for row in batch.locked_parents:
            state.evictable_pages.unlock_parent(row, now)

    def _enter(self, page: _PageWrite, checksum: int, now: float) -> int:
        """Insert a written page into the index. Returns ``NO_ROW`` if its prefix was evicted
        meanwhile, or if another writer inserted it first."""
        state, index = self._state, self._state.index
        parent = NO_ROW if page.parent is None else index.row_of.get(page.parent)
        if page.key in index.row_of or parent is None:
            return NO_ROW
        row = index.insert(page.key, parent, page.unit)
        index.set_checksum(row, checksum)
        index.write_meta(row, clamp_to_now(page.meta, now))
        self._lifetimes.set_expiry(row)
        self._index_writer.mark_changed(row)
        state.counters.written_pages += 1
        state.counters.written_bytes += state.content.page_bytes
        return row

    def _handle_write_error(self, error: OSError, unit: int) -> None:
        state = self._state
        kind = fault_kind(error)
        state.faults.record(kind, error)
        state.counters.refused_pages[kind] += 1
        if kind == "full":
            state.units.record_full_disk(unit)
            self._no_growth_until = self._monotonic() + GROWTH_RETRY_S
        else:
            state.units.free((unit,))

    def _retry_growth(self) -> None:
        if not self._state.units.may_grow and self._monotonic() >= self._no_growth_until:
            self._state.units.allow_growth()
