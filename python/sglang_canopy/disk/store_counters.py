"""Counters of the disk store: plain numbers that only grow, read by exporters."""

from __future__ import annotations

import errno
import logging
import sqlite3
from collections import Counter
from dataclasses import dataclass, field

logger = logging.getLogger("sglang_canopy.disk")


def is_damaged(error: sqlite3.Error) -> bool:
    """Return whether the file is broken, as opposed to out of space, read-only or busy."""
    if isinstance(error, sqlite3.OperationalError):
        name = getattr(error, "sqlite_errorname", "") or ""
        return name.startswith(("SQLITE_CORRUPT", "SQLITE_NOTADB", "SQLITE_IOERR_SHORT_READ")) or (
            "no such table" in str(error)
        )
    return isinstance(error, sqlite3.DatabaseError)


def fault_kind(error: OSError | sqlite3.Error) -> str:
    if isinstance(error, OSError):
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            return "full"
        return "read-only" if error.errno in (errno.EROFS, errno.EACCES, errno.EPERM) else "io"
    name = getattr(error, "sqlite_errorname", "") or ""
    if name.startswith("SQLITE_FULL"):
        return "full"
    if name.startswith(("SQLITE_READONLY", "SQLITE_CANTOPEN")):
        return "read-only"
    return "index" if is_damaged(error) else "io"


FAULTS = ("full", "read-only", "io", "corrupt", "index", "clock", "locked", "internal")
"""Kinds of faults. The pages concerned are recomputed."""


@dataclass(slots=True)
class StoreCounters:
    """Counters in pages, unless the name has another unit."""

    written_pages: int = 0
    written_bytes: int = 0
    present_pages: int = 0
    """Pages offered for writing that were already on disk."""
    refused_pages: Counter[str] = field(default_factory=Counter)
    """Pages not written, by reason: ``no-prefix``, ``capacity``, ``quota``, ``unavailable``, or a fault."""
    read_pages: int = 0
    read_bytes: int = 0
    evicted_pages: Counter[str] = field(default_factory=Counter)
    """Pages removed: by ``capacity``, ``ttl``, ``quota``, ``trim``, ``corrupt``, ``cleared``, ``deleted``."""
    faults: Counter[str] = field(default_factory=Counter)
    orphan_units: int = 0
    """Units of data without an index row, cut off at start."""
    dropped_rows: int = 0
    """Index rows without a prefix or without data."""


class Faults:
    """Count faults and log the first of each kind."""

    def __init__(self, counters: StoreCounters, folder_name: str) -> None:
        self._counters = counters
        self._folder_name = folder_name

    def record(self, kind: str, error: object, times: int = 1) -> None:
        assert kind in FAULTS, kind
        if not self._counters.faults[kind]:
            logger.warning(
                "Disk store %s: %s: %s. Pages are recomputed instead; this is logged once, and "
                "counted as fault %r.",
                self._folder_name,
                kind,
                error,
                kind,
            )
        self._counters.faults[kind] += times
