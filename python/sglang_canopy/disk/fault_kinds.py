"""Map disk errors to kinds of faults."""

from __future__ import annotations

import errno
import sqlite3


def damaged(error: sqlite3.Error) -> bool:
    """Whether the file is broken, as opposed to out of space, read-only or busy."""
    if isinstance(error, sqlite3.OperationalError):
        name = getattr(error, "sqlite_errorname", "") or ""
        return name.startswith(("SQLITE_CORRUPT", "SQLITE_NOTADB", "SQLITE_IOERR_SHORT_READ")) or (
            "no such table" in str(error)
        )
    return isinstance(error, sqlite3.DatabaseError)


def kind_of(error: OSError | sqlite3.Error) -> str:
    """Return the kind of a fault, one of ``FAULTS``."""
    if isinstance(error, OSError):
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            return "full"
        return "read-only" if error.errno in (errno.EROFS, errno.EACCES, errno.EPERM) else "io"
    name = getattr(error, "sqlite_errorname", "") or ""
    if name.startswith("SQLITE_FULL"):
        return "full"
    if name.startswith(("SQLITE_READONLY", "SQLITE_CANTOPEN")):
        return "read-only"
    return "index" if damaged(error) else "io"
