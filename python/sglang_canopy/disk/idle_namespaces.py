"""Namespaces in the store's folder that no server uses: of another model, layout or release.

They count against the capacity, and are removed when their room is needed, least recently used first.
Namespaces of running servers, and of the other ranks of this server, have capacities of their own.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import math
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from sglang_canopy.disk.folder import LOCK_FILE, NAMESPACE_FILE, TEMPORARY_FILE, is_same_server

logger = logging.getLogger(__name__)

SIZES_VALID_S = 10.0
"""Seconds for which measured sizes of the namespaces are used."""


@dataclass(slots=True, frozen=True)
class IdleNamespace:
    """A namespace without a server."""

    changed_at: float
    """Unix time of its last change."""
    path: Path
    size_bytes: int
    is_temporary: bool
    """Whether no later server uses it."""

    def remove(self, reason: str) -> bool:
        """Remove it unless a server claimed it meanwhile. Returns whether it is gone."""
        try:
            with _locked_namespace(self.path):
                for pages in self.path.glob("pages-*"):  # the mark last, in case this process ends
                    shutil.rmtree(pages, ignore_errors=True)
                shutil.rmtree(self.path, ignore_errors=True)
        except OSError:
            return False
        size_gb = self.size_bytes / 1e9
        logger.info("Disk store: removed %s (%.3f GB): %s.", self.path, size_gb, reason)
        return not self.path.exists()


@contextlib.contextmanager
def _locked_namespace(path: Path) -> Iterator[None]:
    """Hold the lock of a namespace. Raises ``OSError`` if a server has it."""
    lock = os.open(path / LOCK_FILE, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(lock)


class IdleNamespaces:
    """The idle namespaces beside the store at ``own_folder``. Together they may hold ``capacity_bytes``."""

    def __init__(
        self, own_folder: Path, capacity_bytes: int, monotonic: Callable[[], float]
    ) -> None:
        self._own_folder = own_folder
        self._rank_count = 1
        """Number of this server's ranks with a store in this folder."""
        self._capacity_bytes = capacity_bytes
        self._monotonic = monotonic
        self._idle_bytes = 0
        self._measured_at = -math.inf

    def find(self) -> list[IdleNamespace]:
        """Return the namespaces without a server, least recently used first."""
        namespaces, rank_count = [], 1
        for namespace_file in self._own_folder.parent.glob(f"*/{NAMESPACE_FILE}"):
            path = namespace_file.parent
            if path == self._own_folder:
                continue
            is_temporary = (path / TEMPORARY_FILE).exists()
            if is_same_server(path, self._own_folder) and not is_temporary:
                rank_count += 1
                continue  # it may be starting
            try:
                with _locked_namespace(path):
                    stats = [file.stat() for file in path.rglob("*")]
            except OSError:
                continue  # in use, or gone
            size_bytes, changed_at = sum(s.st_size for s in stats), max(s.st_mtime for s in stats)
            namespaces.append(IdleNamespace(changed_at, path, size_bytes, is_temporary))
        self._rank_count = rank_count
        return sorted(namespaces, key=lambda namespace: namespace.changed_at)

    def remove_temporary(self) -> None:
        """Remove the namespaces that no later server uses, and log the others."""
        for namespace in self.find():
            if namespace.is_temporary:
                namespace.remove("no later server uses it")
                continue
            logger.info(
                "%s holds %.3f GB of another model, layout or release (its file 'namespace' "
                "identifies it). It counts against the capacity, and is removed when its room is "
                "needed.",
                namespace.path,
                namespace.size_bytes / 1e9,
            )

    def make_room(self, used_bytes: int) -> None:
        """Remove namespaces, the oldest first, until they and ``used_bytes`` fit the capacity. Each
        rank has the capacity, and gives room for its share of the namespaces."""
        now = self._monotonic()
        is_recent = now - self._measured_at < SIZES_VALID_S
        if is_recent and (not self._idle_bytes or self._fits(used_bytes)):
            return
        namespaces = self.find()
        self._measured_at = now
        self._idle_bytes = sum(namespace.size_bytes for namespace in namespaces)
        for namespace in namespaces:
            if self._fits(used_bytes):
                return
            if namespace.remove("its room is needed"):
                self._idle_bytes -= namespace.size_bytes

    def _fits(self, used_bytes: int) -> bool:
        return self._idle_bytes / self._rank_count + used_bytes <= self._capacity_bytes

    def remove_oldest(self) -> bool:
        """Remove the oldest namespace, since the volume is full. Returns false if there is none."""
        return any(namespace.remove("the volume is full") for namespace in self.find())
