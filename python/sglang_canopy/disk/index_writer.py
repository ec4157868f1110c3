"""Write changes of the in-memory index to the index file."""

from __future__ import annotations

import itertools
import sqlite3
from collections.abc import Iterable

from sglang_canopy.disk.journal import make_record
from sglang_canopy.disk.state import StoreState
from sglang_canopy.disk.store_counters import fault_kind, is_damaged

_PATH_ENDS_PER_COMMIT = 256
_USED_ROWS_PER_COMMIT = 64
"""Maximum used rows per commit in addition to new pages: ends of used paths, and other rows. The
next start derives the last use of a whole path from its end."""


class IndexWriter:
    """Collect changed rows and commit them in ``flush``."""

    def __init__(self, state: StoreState) -> None:
        self._state = state
        self._changed_rows: set[int] = set()
        """New, removed or moved rows, all committed by the next ``flush``."""
        self._used_rows: set[int] = set()
        """Rows with a use that is not committed."""
        self._path_ends: dict[int, None] = {}
        """Last rows of used paths, oldest use first."""

    # The caller holds the store's lock.

    def mark_changed(self, *rows: int) -> None:
        self._changed_rows.update(rows)

    def mark_removed(self, row: int) -> None:
        self._changed_rows.add(row)
        self._used_rows.discard(row)

    def mark_used(self, rows: Iterable[int], path_end: int | None = None) -> None:
        self._used_rows.update(rows)
        if path_end is not None:
            self._path_ends[path_end] = None

    def forget(self) -> None:
        self._changed_rows, self._used_rows, self._path_ends = set(), set(), {}

    # These methods take the locks.

    def flush(self, *, everything: bool = False) -> bool:
        """Commit new and removed pages, and a bounded number of uses; see ``DiskStore.flush``."""
        state = self._state
        if state.unavailable:
            return False
        with state.journal.lock:
            with state.lock:
                changed = self._take_changed(everything)
                index = state.index
                present = [row for row in changed if row >= 0 and index.key_at(row) is not None]
                records = [make_record(index, row, state.ttl) for row in present]
                removed = changed.difference(present)
            if not changed:
                return True
            try:
                state.journal.commit(records, removed)
            except (sqlite3.Error, OSError) as error:
                return self._handle_commit_error(error, changed)
            return True

    def _take_changed(self, everything: bool) -> set[int]:
        changed, self._changed_rows = self._changed_rows, set()
        for row in list(itertools.islice(self._path_ends, _PATH_ENDS_PER_COMMIT)):
            del self._path_ends[row]
            if row in self._used_rows:
                self._used_rows.discard(row)
                changed.add(row)
        for _ in range(len(self._used_rows) if everything else _USED_ROWS_PER_COMMIT):
            if not self._used_rows:
                break
            changed.add(self._used_rows.pop())
        return changed

    def _handle_commit_error(self, error: sqlite3.Error | OSError, changed: set[int]) -> bool:
        """Queue the rows for the next commit, and rebuild the index file if it is damaged."""
        state = self._state
        state.faults.record(fault_kind(error), f"index: {error}")
        with state.lock:
            self._changed_rows |= changed
        if not (isinstance(error, sqlite3.Error) and is_damaged(error)):
            return False
        try:  # rebuild a broken file from memory
            state.journal.create_empty(error)
            with state.lock:
                rows = state.index.row_of.values()
                records = [make_record(state.index, row, state.ttl) for row in rows]
                self._changed_rows.clear()
                self._used_rows.clear()
            state.journal.commit(records, ())
        except (sqlite3.Error, OSError) as second_error:
            state.faults.record(fault_kind(second_error), f"index: {second_error}")
            with state.lock:
                self._changed_rows.update(state.index.row_of.values())
            return False
        return True
