"""The folder of a chunk store's files. Faults are logged and lose chunks, not the server."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
from collections.abc import Callable
from pathlib import Path

from canopy_chunks.store import disk
from canopy_chunks.store.chunk import Chunk
from canopy_chunks.store.disk import DiskChunk
from canopy_chunks.store.host_memory import HostChunk
from sglang_canopy.errors import CanopyError

logger = logging.getLogger(__name__)

_FULL = (errno.ENOSPC, errno.EDQUOT)


class ChunkFolder:
    """Chunk files by key.

    keep: for ranks, which must hold the same chunks: selects the keys of an earlier run's files to
    keep, in their order. With ``keep``, a chunk that cannot be written is stored anyway, and fails
    when it is read. full: the last write failed for lack of space. Raises CanopyError for a folder
    that cannot be used.
    """

    def __init__(self, path: Path, keep: Callable[[list[str]], list[str]] | None = None) -> None:
        if not can_hold_files(path):
            raise CanopyError(
                f"directory {path!s} cannot be used: it must be a folder that this process may write to"
            )
        self.path, self._keep, self.full = path, keep, False
        for left in sorted(path.glob("*.tmp")):
            _delete(left)

    def found(self) -> dict[str, DiskChunk]:
        """Return the intact files of an earlier run, oldest first, and delete the others.

        With several ranks, only files that all ranks keep.
        """
        found: dict[str, DiskChunk] = {}
        for path in sorted(self.path.glob("*.chunk"), key=_modified):
            try:
                found[path.stem] = disk.open_chunk(path)
            except CanopyError as error:
                logger.warning("canopy: %s", error)
                _delete(path)
        kept = list(found) if self._keep is None else self._keep(list(found))
        for key in found.keys() - set(kept):
            self.delete(found[key])
        return {key: found[key] for key in kept}

    def write(self, key: str, chunk: Chunk | HostChunk) -> DiskChunk | None:
        """Write a chunk to a file and return it; ``None`` if it cannot be written."""
        path, self.full = self.path / f"{key}.chunk", False
        try:
            disk.write(path, chunk)
            return disk.open_chunk(path)
        except (OSError, CanopyError) as error:
            logger.warning("canopy: a chunk could not be written to disk: %s", error)
            _delete(path)
            if self._keep is not None:
                return disk.lost_chunk(path, chunk)
            self.full = isinstance(error, OSError) and error.errno in _FULL
            return None

    def delete(self, chunk: DiskChunk) -> None:
        """Delete a chunk's file."""
        _delete(chunk.path)

    def remove(self) -> None:
        """Delete the folder, if it is empty."""
        with contextlib.suppress(OSError):
            self.path.rmdir()


def can_hold_files(folder: str | Path) -> bool:
    """Return whether the folder exists, or can be created, and files may be written there."""
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        logger.warning("canopy: %s", error)
        return False
    return os.access(folder, os.W_OK | os.X_OK)


def _modified(path: Path) -> float:
    """Return the modification time of a file, in seconds; 0 if the file is missing."""
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def _delete(path: Path) -> None:
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        logger.warning("canopy: a chunk file could not be deleted: %s", error)
