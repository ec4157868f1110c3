"""The store's folder: owned by this user, private, and locked for one server."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

from sglang_canopy.disk.counters import kind_of
from sglang_canopy.errors import CanopyError
from sglang_canopy.private_file import BAD, read_regular, replace_file, set_aside

MARK = "CANOPY-DISK-STORE"
_MARK_TEXT = "sglang-canopy disk store, version 1\n"
LOCK = "lock"
NAMESPACE = "namespace"
RANK = "|rank: "
"""Separator in a namespace: behind it is what differs between the ranks of one server."""
TEMPORARY = "temporary"
"""File that marks a namespace as temporary: no later server uses it."""


class Unavailable(Exception):
    """The folder cannot be used now, but may be later; the store runs without it."""

    def __init__(self, fault: str, why: str) -> None:
        super().__init__(why)
        self.fault = fault


@dataclass(slots=True)
class Claim:
    """A namespace's own folder, locked for this process.

    ``directory`` is the folder's descriptor. Open and remove files relative to it: the path may belong
    to another folder by now.
    """

    path: Path
    directory: int
    _lock: int
    temporary: bool = False

    def gone(self) -> str | None:
        """Return the path that was removed or replaced since the claim, or ``None``."""
        if not _is_file(self.path, None, self.directory):
            return str(self.path)
        if not _is_file(LOCK, self.directory, self._lock):
            return str(self.path / LOCK)
        return None

    def release(self) -> None:
        for fd in (self.directory, self._lock):
            with contextlib.suppress(OSError):
                os.close(fd)

    def remove_pages(self) -> None:
        """Remove the page files and the index. Call it before ``release``."""
        # NOTE: keep the lock file: another server may be waiting for it.
        for name in os.listdir(self.directory):
            if self.temporary or fnmatch(name, "segment-*.kv") or name.startswith("index.sqlite"):
                with contextlib.suppress(OSError):
                    os.unlink(name, dir_fd=self.directory)
        if self.temporary and self.gone() == str(self.path / LOCK):  # the folder itself exists
            with contextlib.suppress(OSError):
                self.path.rmdir()


def _is_file(path: str | Path, directory: int | None, fd: int) -> bool:
    """Whether ``path``, relative to ``directory``, is the file that ``fd`` has open."""
    try:
        found = os.stat(path, dir_fd=directory, follow_symlinks=False)
    except OSError:
        return False
    ours = os.fstat(fd)
    return (found.st_dev, found.st_ino) == (ours.st_dev, ours.st_ino)


def path_of(folder: str | os.PathLike[str], namespace: str) -> Path:
    """Return the folder of ``namespace`` below ``folder``."""
    parts = namespace.partition(RANK)[0], namespace
    return Path(folder) / "-".join(hashlib.sha256(p.encode()).hexdigest()[:16] for p in parts)


def of_one_server(path: Path, other: Path) -> bool:
    """Whether two namespaces differ only by rank."""
    return path.name.partition("-")[0] == other.name.partition("-")[0]


def claim(folder: str | os.PathLike[str], namespace: str, *, temporary: bool = False) -> Claim:
    """Lock the folder of ``namespace`` below ``folder`` for this process.

    Raises ``CanopyError`` for a folder of another user or with other files, and ``Unavailable`` if the
    disk is read-only or full, or another server has the lock.
    """
    top = Path(folder)
    try:
        path = path_of(top, namespace)
        _make_top(top, path.name)
        path.mkdir(mode=0o700, exist_ok=True)
        _check_ours(path)
        held = _open_claim(path, temporary)
    except OSError as error:
        raise _unavailable(top, error) from error
    try:
        fcntl.flock(held._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        held.release()
        raise Unavailable(
            "locked",
            f"another server has {path}; end it, or give each server a folder of its own",
        ) from error
    if held.gone() is not None:  # a neighbour removed it to make room
        held.release()
        raise Unavailable("locked", f"{path} was removed by another server")
    try:
        _make_file(path / NAMESPACE, namespace)
        if temporary:
            (path / TEMPORARY).touch(mode=0o600)
    except OSError as error:
        held.release()
        raise _unavailable(path, error) from error
    return held


def _open_claim(path: Path, temporary: bool) -> Claim:
    directory = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        lock = os.open(LOCK, flags, 0o600, dir_fd=directory)
    except OSError:
        os.close(directory)
        raise
    return Claim(path, directory, lock, temporary)


def _unavailable(path: Path, error: OSError) -> Unavailable:
    return Unavailable(kind_of(error), f"{path}: {error.strerror}")


def _make_top(top: Path, mine: str) -> None:
    """Create ``top``, or check that it is a store's folder. ``mine`` may exist in it."""
    if top.is_symlink() or (top.exists() and not top.is_dir()):
        raise CanopyError(f"disk store: {top} is not a folder; name a folder, or a new path")
    if not top.exists():
        top.mkdir(mode=0o700, parents=True)
    names = set(os.listdir(top)) - {"lost+found", mine}
    foreign = sorted(name for name in names if not name.startswith(f".{MARK}."))
    if foreign and not names & {MARK, MARK + BAD}:
        raise CanopyError(
            f"disk store: {top} holds other files ({', '.join(foreign[:3])}); "
            "name an empty folder, or a new path"
        )
    _check_ours(top)
    _make_file(top / MARK, _MARK_TEXT)


def _check_ours(path: Path) -> None:
    status = path.lstat()
    if status.st_uid != os.geteuid():
        raise CanopyError(
            f"disk store: {path} belongs to user {status.st_uid}, this is user {os.geteuid()}; "
            "name a folder of your own"
        )
    if status.st_mode & 0o077:
        path.chmod(0o700)


def _make_file(path: Path, text: str) -> None:
    """Write ``text`` to ``path`` unless it is there. Other content is set aside first."""
    with contextlib.suppress(FileNotFoundError):
        found = read_regular(path, len(text.encode()))
        if found == text.encode():
            return
        if found:
            set_aside(path, "damaged, or of another version")
    replace_file(path, text, durable=True)
