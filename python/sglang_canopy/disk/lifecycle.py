"""Open the store's folder, at start or later, and load the pages of an earlier process."""

from __future__ import annotations

import contextlib
import gc
import os
import sqlite3
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path

from sglang_canopy.disk.eviction import Eviction
from sglang_canopy.disk.folder import FolderClaim, FolderUnavailable, claim_folder
from sglang_canopy.disk.index_writer import IndexWriter
from sglang_canopy.disk.journal import Journal
from sglang_canopy.disk.lifetimes import Lifetimes
from sglang_canopy.disk.loading import load_pages, restore_uses
from sglang_canopy.disk.segments import SegmentFiles
from sglang_canopy.disk.state import StoreState
from sglang_canopy.disk.store_counters import fault_kind, is_damaged
from sglang_canopy.errors import CanopyError


@contextlib.contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Disable garbage collection, which would repeatedly scan all new records and free none."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


CLEARED_REASON = "the store was cleared"
SUSPEND_WAIT_S = 1.0
"""Maximum seconds for the store's lock when it is suspended."""


class Lifecycle:
    """Open, close and discard the store; by one thread at a time."""

    path: Path
    """Folder of the namespace; set by the first successful claim."""

    def __init__(
        self,
        state: StoreState,
        index_writer: IndexWriter,
        lifetimes: Lifetimes,
        eviction: Eviction,
        *,
        folder: str | os.PathLike[str],
        namespace: str,
        is_temporary: bool,
    ) -> None:
        self.claim: FolderClaim | None = None
        self._was_opened = False
        self._starts_empty = False
        """Whether the next ``open`` begins a new folder of pages."""
        self._open_lock = threading.Lock()
        self._state = state
        self._index_writer = index_writer
        self._lifetimes = lifetimes
        self._eviction = eviction
        self._folder, self._namespace, self._is_temporary = folder, namespace, is_temporary

    def open(self) -> bool:
        """Claim the folder and load its index; see ``DiskStore.open``."""
        state = self._state
        with self._open_lock:  # writers and the sweeper open a cleared store
            while state.unavailable is not None:
                fault = self._try_to_open()
                if fault is not None and not (
                    fault == "full" and state.idle_namespaces.remove_oldest()
                ):
                    return False
        return True

    def _try_to_open(self) -> str | None:
        """Return the kind of the fault, or ``None`` if the store is available now."""
        state = self._state
        self._release_claim()  # of a suspended store
        try:
            self.claim = claim_folder(
                self._folder,
                self._namespace,
                is_temporary=self._is_temporary,
                starts_empty=self._starts_empty,
            )
            self._starts_empty = False
            self.path = self.claim.path
            state.segments = SegmentFiles(self.claim.pages_fd, state.content.page_bytes)
            state.journal = Journal(self.claim)
            with state.lock:
                self._load()
                state.unavailable = None
            self._was_opened = True
        except FolderUnavailable as error:
            return self._become_unavailable(error.fault, error)
        except CanopyError as error:
            if not self._was_opened:
                raise
            return self._become_unavailable("io", error)
        except (OSError, sqlite3.Error) as error:
            return self._become_unavailable(fault_kind(error), error)
        self._index_writer.flush(everything=True)
        state.idle_namespaces.remove_temporary()
        return None

    def clear(self) -> None:
        """Remove every page; see ``DiskStore.clear``."""
        state = self._state
        with state.lock:
            self._starts_empty = True
            if state.unavailable is None:
                state.counters.evicted_pages["cleared"] += len(state.index)
                state.unavailable = CLEARED_REASON
                self._forget_rows()

    def open_cleared(self) -> None:
        """Open the new folder of pages of a store that was cleared."""
        if self._state.unavailable == CLEARED_REASON:
            self.open()

    def suspend(self, reason: str) -> bool:
        """Become unavailable without I/O; see ``DiskStore.suspend``."""
        state = self._state
        if not state.lock.acquire(timeout=SUSPEND_WAIT_S):
            return False
        try:
            if state.unavailable is None:
                state.unavailable = reason
                state.faults.record("io", reason)
                self._forget_rows()
        finally:
            state.lock.release()
        return True

    def close(self) -> None:
        """Commit all changes and release the folder."""
        self.open_cleared()
        state = self._state
        if state.unavailable is None:
            with state.journal.lock, state.lock:  # same order as in every other method
                self._index_writer.flush(everything=True)
                state.unavailable = "closed"
                state.journal.close()
                state.segments.close()
        self._release_claim()  # closes those of a suspended store

    def discard(self) -> None:
        """Close, and remove every page from the disk."""
        self.open_cleared()
        claim, self.claim = self.claim, None  # keep the folder until the pages are gone
        self.close()
        with self._state.lock:
            self._forget_rows()
        if claim is not None:
            claim.remove_pages()
            claim.release()

    def _become_unavailable(self, fault: str, reason: object) -> str:
        state = self._state
        with state.lock:
            if str(reason) != state.unavailable:
                state.unavailable = str(reason)
                state.faults.record(fault, reason)
            self._forget_rows()
        self._release_claim()
        return fault

    def _release_claim(self) -> None:
        if self.claim is not None:
            self._state.journal.close()
            self._state.segments.close()
            self.claim.release()
            self.claim = None

    def _forget_rows(self) -> None:
        """Remove all pages from memory; the policy's state and the TTLs stay."""
        state = self._state
        state.forget_pages()
        self._index_writer.forget()

    # ---- loading ----

    def _load(self) -> None:
        state, now = self._state, self._state.clock()
        try:
            state.journal.open()
            with _no_garbage_collection():
                is_renumbered = self._load_rows(now)
        except sqlite3.Error as error:
            if not is_damaged(error):
                raise
            state.faults.record("index", error)
            state.forget_pages()
            state.journal.create_empty(error)
            is_renumbered = False
        if is_renumbered:
            state.journal.create_empty()
            self._index_writer.mark_changed(*state.index.row_of.values())
        self._shrink_to_capacity(now)
        trimmed_bytes = state.segments.trim(state.units.end_unit)
        state.counters.orphan_units += trimmed_bytes // state.content.page_bytes

    def _load_rows(self, now: float) -> bool:
        """Load the index file into an empty store, and count unusable records (``loading``). Returns
        whether the rows were renumbered."""
        state = self._state
        rows, unloaded_rows, is_renumbered = load_pages(state.journal.read_records(), state, now)
        if not is_renumbered:
            self._index_writer.mark_changed(*unloaded_rows)
        index = state.index
        state.units.adopt({index.unit[row] for row in rows})
        restore_uses(index, rows)
        for row in rows:
            self._lifetimes.set_expiry(row)
            state.evictable_pages.charge_tenant(index.label("tenant", row))
        for row in rows:
            state.evictable_pages.refresh(row, now)
        unloaded = len(unloaded_rows)
        state.counters.dropped_rows += unloaded
        if unloaded:
            state.faults.record("index", f"{unloaded} records were not usable", unloaded)
        return is_renumbered

    # ---- reduced capacity ----

    def _shrink_to_capacity(self, now: float) -> None:
        """Evict pages above the capacity, and move pages in units above the limit."""
        state, index, units = self._state, self._state.index, self._state.units
        while units.used_units > units.max_units:
            victim = state.evictable_pages.victim(now)
            assert victim is not None, "a tree without leaves"
            self._eviction.remove(victim.row, "capacity", now, is_victim=True)
        units.shrink()
        rows_above = [row for row in index.row_of.values() if index.unit[row] >= units.max_units]
        self._move_down(rows_above)

    def _move_down(self, rows: Iterable[int]) -> None:
        """Copy the pages of ``rows`` into free units."""
        state, index, content = self._state, self._state.index, self._state.content
        for row in rows:
            new_unit, buffers = state.units.allocate(), [memoryview(bytearray(content.page_bytes))]
            state.segments.read([(index.unit[row], buffers)])
            state.segments.write([(new_unit, buffers)])
            state.units.retire()
            index.unit[row] = new_unit
            self._index_writer.mark_changed(row)
