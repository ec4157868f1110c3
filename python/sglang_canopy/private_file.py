"""Private files, written atomically, and the folder for files that can be rebuilt.

All files that only store learnt or rebuildable data (a profile, an index, a mark) share one rule: a
damaged file, or a file of another version, is ``set_aside``, and its reader starts empty.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import stat
import tempfile
from collections import Counter
from pathlib import Path

logger = logging.getLogger(__name__)

BAD_SUFFIX = ".bad"
SET_ASIDE_COUNTS: Counter[str] = Counter()
"""Number of unusable files of this process, by name."""


def read_regular(path: Path | str, max_bytes: int) -> bytes:
    """Return a regular file's first ``max_bytes + 1`` bytes; a longer result than ``max_bytes``
    means that the file is too long. Raises ``OSError``, also for a named pipe or a device, which
    would block the reader."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    with os.fdopen(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "not a regular file", str(path))
        return file.read(max_bytes + 1)


def replace_file(path: Path | str, text: str, *, durable: bool = False) -> None:
    """Write ``text`` to ``path`` atomically with mode 0600. ``durable``: sync the file to disk first.
    Raises ``OSError``; the old file is then unchanged and no scratch file remains."""
    path = Path(path)
    # mkstemp creates the file with mode 0600, and the rename keeps the mode.
    descriptor, scratch_path = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        os.replace(scratch_path, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(scratch_path)
        raise


def set_aside(path: Path | str, reason: object) -> None:
    """Rename an unusable file to ``NAME.bad``, replacing an earlier one; log and count it. If the
    folder is read-only, the file stays and is replaced by its next write."""
    path = Path(path)
    SET_ASIDE_COUNTS[path.name] += 1
    kept_path = path.with_name(path.name + BAD_SUFFIX)
    try:
        os.replace(path, kept_path)
    except OSError:
        kept_path = path
    logger.warning(
        "%s cannot be used (%s). It is kept as %s; starting without it.", path, reason, kept_path
    )
