"""The store's folder: owned by this user, private, and locked for one server."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import secrets
import shutil
from dataclasses import dataclass
from pathlib import Path

from sglang_canopy.disk.store_counters import fault_kind
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

    ``directory`` is the descriptor of ``pages``. Open and remove files relative to it: the path may
    belong to another folder by now.
    """

    path: Path
    _lock: int
    temporary: bool
    pages: Path = Path()
    """The current folder of pages. Each clearing begins another one."""
    directory: int = -1

    def open_pages(self, fresh: bool) -> None:
        """Open the latest folder of pages, or a ``fresh`` one, and remove the others."""
        folders = sorted(p for p in self.path.glob("pages-*-*") if p.name.split("-")[1].isdigit())
        if fresh or not folders:
            number = int(folders[-1].name.split("-")[1]) + 1 if folders else 0
            # NOTE: names are never used again. SQLite removes files by path when it closes.
            folders.append(self.path / f"pages-{number:06d}-{secrets.token_hex(4)}")
            folders[-1].mkdir(mode=0o700)
        *others, self.pages = folders
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW
        self.directory = os.open(self.pages, flags)
        for path in others:
            shutil.rmtree(path, ignore_errors=True)

    def release(self) -> None:
        for fd in (self.directory, self._lock):
            with contextlib.suppress(OSError):
                os.close(fd)
        self.directory = self._lock = -1

    def remove_pages(self) -> None:
        """Remove the pages, and the namespace if it is temporary. Call it before ``release``."""
        # NOTE: keep the lock file: another server may be waiting for it.
        shutil.rmtree(self.path if self.temporary else self.pages, ignore_errors=True)


def subfolder(folder: str | os.PathLike[str], namespace: str) -> Path:
    """Return the folder of ``namespace`` below ``folder``."""
    parts = namespace.partition(RANK)[0], namespace
    return Path(folder) / "-".join(hashlib.sha256(p.encode()).hexdigest()[:16] for p in parts)


def is_same_server(path: Path, other: Path) -> bool:
    """Whether two namespaces differ only by rank."""
    return path.name.partition("-")[0] == other.name.partition("-")[0]


def claim(
    folder: str | os.PathLike[str], namespace: str, *, temporary: bool = False, fresh: bool = False
) -> Claim:
    """Lock the folder of ``namespace`` below ``folder`` for this process. ``fresh``: without pages.

    Raises ``CanopyError`` for a folder of another user or with other files, and ``Unavailable`` if the
    disk is read-only or full, or another server has the lock.
    """
    top, path = Path(folder), subfolder(folder, namespace)
    try:
        _make_top(top, path.name)
        path.mkdir(mode=0o700, exist_ok=True)
        _check_ours(path)
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        claimed = Claim(path, os.open(path / LOCK, flags, 0o600), temporary)
    except OSError as error:
        raise _unavailable(top, error) from error
    try:
        fcntl.flock(claimed._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.fstat(claimed._lock).st_nlink == 0:
            raise BlockingIOError(f"{path} was removed to make room")
    except OSError as error:
        claimed.release()
        raise Unavailable(
            "locked", f"another server has {path}; end it, or give each server a folder of its own"
        ) from error
    try:
        _make_file(path / NAMESPACE, namespace)
        if temporary:
            (path / TEMPORARY).touch(mode=0o600)
        claimed.open_pages(fresh)
    except OSError as error:
        claimed.release()
        raise _unavailable(path, error) from error
    return claimed


def _unavailable(path: Path, error: OSError) -> Unavailable:
    return Unavailable(fault_kind(error), f"{path}: {error.strerror}")


def _make_top(top: Path, namespace_folder: str) -> None:
    """Create ``top``, or check that it is a store's folder. ``namespace_folder`` may exist in it."""
    if top.is_symlink() or (top.exists() and not top.is_dir()):
        raise CanopyError(f"disk store: {top} is not a folder; name a folder, or a new path")
    if not top.exists():
        top.mkdir(mode=0o700, parents=True)
    names = set(os.listdir(top)) - {"lost+found", namespace_folder}
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
        content = read_regular(path, len(text.encode()))
        if content == text.encode():
            return
        if content:
            set_aside(path, "damaged, or of another version")
    replace_file(path, text, durable=True)
