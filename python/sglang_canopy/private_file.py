"""Files for their owner alone, written whole or not at all, and where what can be made again lies.

One rule for each file that only keeps what was learnt or can be made again (a profile, an index, a
mark): one that is damaged or of another version is ``set_aside``, and its user starts empty.
"""

from __future__ import annotations

import contextlib
import logging
import os
import tempfile
from collections import Counter
from pathlib import Path

logger = logging.getLogger(__name__)

BAD = ".bad"
SET_ASIDE: Counter[str] = Counter()
"""Files that this process could not use, by name."""


def cache_folder(name: str) -> Path:
    """``$XDG_CACHE_HOME/canopy/NAME``, by default below ``~/.cache``."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "canopy" / name


def replace_file(path: Path | str, text: str, *, durable: bool = False) -> None:
    """Put ``text`` at ``path`` with mode 0600; a reader sees the old file or the new one.

    ``durable``: it is on the disk when this returns. Raises ``OSError``; then the old file
    stands and nothing is left beside it.
    """
    path = Path(path)
    # mkstemp makes the file with mode 0600, and the rename keeps it so.
    handle, scratch = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        os.replace(scratch, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(scratch)
        raise


def set_aside(path: Path | str, why: object) -> None:
    """Rename a file that cannot be used to ``NAME.bad`` (an earlier one goes), log and count it.

    Where the folder takes no change, the file stays, and is replaced when it is next written.
    """
    path = Path(path)
    SET_ASIDE[path.name] += 1
    now = path.with_name(path.name + BAD)
    try:
        os.replace(path, now)
    except OSError:
        now = path
    logger.warning("%s cannot be used (%s). It is kept as %s; starting without it.", path, why, now)
