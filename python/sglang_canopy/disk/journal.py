"""The index file: records of all pages that survive ``kill -9``, in SQLite's WAL mode.

Records are committed after the pages' data was written, one transaction per batch. With
``synchronous=NORMAL`` a commit survives the end of the process; a power failure loses the commits since
the last checkpoint, but no consistency. Page data is never fsynced: a page that did not reach the disk
fails its checksum and counts as absent.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
import threading
from collections.abc import Iterable, Iterator
from typing import Any

from sglang_canopy.disk.folder import FolderClaim
from sglang_canopy.disk.index import PageIndex
from sglang_canopy.disk.page import PAGE_FIELDS
from sglang_canopy.private_file import set_aside
from sglang_canopy.ttl.table import TTLTable

INDEX_FILE = "index.sqlite"
INDEX_VERSION = 5

_STORE_FIELDS = ("id", "key", "parent", "unit", "checksum")
"""``id``: the row. ``parent``: the parent's row, or -1. ``unit``: the unit that stores the page."""
RECORD_FIELDS = (*_STORE_FIELDS, *PAGE_FIELDS)
"""Columns of the index file. A page's group is stored as the id of the group's root, in bytes."""

JournalRecord = tuple[Any, ...]

_COLUMN_NAMES = ", ".join(f'"{name}"' for name in RECORD_FIELDS[1:])
_CREATE_SQL = f"CREATE TABLE IF NOT EXISTS pages (id INTEGER PRIMARY KEY, {_COLUMN_NAMES})"
_PUT_SQL = f"INSERT OR REPLACE INTO pages VALUES ({', '.join('?' * len(RECORD_FIELDS))})"


def make_record(index: PageIndex, row: int, ttl: TTLTable) -> JournalRecord:
    """Return the record of the row: the values of ``RECORD_FIELDS``."""
    meta = index.read_meta(row)
    values = {name: getattr(meta, name) for name in PAGE_FIELDS}
    has_group = 0 <= meta.group < len(ttl.groups)
    values["group"] = ttl.groups[meta.group].root.to_bytes(8, "little") if has_group else None
    return (
        row,
        index.key_of[row],
        index.parent[row],
        index.unit[row],
        index.checksum(row).to_bytes(16, "little"),
        *values.values(),
    )


class Journal:
    """One connection to the index file. Thread-safe by its own lock, so commits never block lookups.

    Every method may raise ``sqlite3.Error`` or ``OSError``; ``is_damaged`` distinguishes a broken file
    from a full disk.
    """

    def __init__(self, claim: FolderClaim) -> None:
        self.folder = claim.pages
        self._claim = claim
        self.lock = threading.RLock()
        self._connection: sqlite3.Connection | None = None

    def open(self) -> None:
        path = self.folder / INDEX_FILE
        # SQLite copies this file's mode to its WAL and shared-memory files.
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        fd = os.open(INDEX_FILE, flags, 0o600, dir_fd=self._claim.pages_fd)
        os.close(fd)
        connection = sqlite3.connect(
            path, isolation_level=None, check_same_thread=False, timeout=5.0
        )
        try:
            connection.execute("PRAGMA journal_mode=WAL")
            connection.execute("PRAGMA synchronous=NORMAL")
            connection.execute("PRAGMA trusted_schema=OFF")
            version = connection.execute("PRAGMA user_version").fetchone()[0]
            if version not in (0, INDEX_VERSION):
                raise sqlite3.DatabaseError(f"index version {version}, expected {INDEX_VERSION}")
            connection.execute(_CREATE_SQL)
            columns = [c[1] for c in connection.execute("PRAGMA table_info(pages)")]
            if tuple(columns) != RECORD_FIELDS:
                raise sqlite3.DatabaseError(f"index has columns {columns}")
            if version == 0:
                connection.execute(f"PRAGMA user_version={INDEX_VERSION}")
        except BaseException:
            connection.close()
            raise
        self._connection = connection

    def read_records(self) -> Iterator[JournalRecord]:
        """Iterate over all records by id, as ``RECORD_FIELDS``. The caller validates them."""
        assert self._connection is not None
        self._connection.text_factory = _decode_text
        yield from self._connection.execute("SELECT * FROM pages ORDER BY id")

    def commit(self, records: Iterable[JournalRecord], removed_rows: Iterable[int]) -> None:
        """Write ``records``, and delete those of ``removed_rows``, in one transaction."""
        connection = self._connection
        if connection is None:
            raise sqlite3.OperationalError("index is closed")
        puts, deletes = list(records), [(row,) for row in removed_rows]
        with self.lock:
            try:
                self._run_transaction(connection, puts, deletes)
            except sqlite3.OperationalError:
                # The disk may be full: a checkpoint makes room in the WAL.
                connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
                self._run_transaction(connection, puts, deletes)

    @staticmethod
    def _run_transaction(
        connection: sqlite3.Connection, puts: list[JournalRecord], deletes: list[tuple[int]]
    ) -> None:
        connection.execute("BEGIN IMMEDIATE")
        try:
            connection.executemany("DELETE FROM pages WHERE id = ?", deletes)
            connection.executemany(_PUT_SQL, puts)
            connection.execute("COMMIT")
        except BaseException:
            with contextlib.suppress(sqlite3.Error):
                connection.execute("ROLLBACK")
            raise

    def create_empty(self, damage: object = None) -> None:
        """Create an empty index file. If ``damage`` is given, keep a copy of the old one."""
        with self.lock:
            self.close()
            if damage is not None:
                set_aside(self.folder / INDEX_FILE, damage)
            for suffix in ("", "-wal", "-shm", "-journal"):
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(INDEX_FILE + suffix, dir_fd=self._claim.pages_fd)
            self.open()

    def close(self) -> None:
        with self.lock:
            if self._connection is not None:
                with contextlib.suppress(sqlite3.Error):
                    self._connection.close()
                self._connection = None


def _decode_text(raw: bytes) -> str | bytes:
    """Decode a text; invalid UTF-8 stays bytes, which validation rejects."""
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return raw
