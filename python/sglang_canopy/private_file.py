"""Files for their owner alone, written whole or not at all, and where what can be made again lies."""

from __future__ import annotations

import contextlib
import os
import tempfile
from pathlib import Path


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
