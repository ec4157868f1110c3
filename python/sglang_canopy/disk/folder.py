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
from sglang_canopy.private_file import BAD_SUFFIX, read_regular, replace_file, set_aside

MARK_FILE = "CANOPY-DISK-STORE"
_MARK_TEXT = "sglang-canopy disk store, version 1\n"
LOCK_FILE = "lock"
NAMESPACE_FILE = "namespace"
RANK_SEPARATOR = "|rank: "
"""Separator in a namespace: the text behind it differs between the ranks of one server."""
TEMPORARY_FILE = "temporary"
"""File that marks a namespace as temporary: no later server uses it."""


class FolderUnavailable(Exception):
    """The folder cannot be used now, but may be later; the store runs without it."""

    def __init__(self, fault: str, reason: str) -> None:
        super().__init__(reason)
        self.fault = fault


@dataclass(slots=True)
class FolderClaim:
    """A namespace's own folder, locked for this process.

    ``pages_fd`` is the descriptor of ``pages``. Open and remove files relative to it: the path may
    belong to another folder by now.
    """

    path: Path
    _lock_fd: int
    is_temporary: bool
    pages: Path = Path()
    """The current folder of pages. Each clearing begins another one."""
    pages_fd: int = -1

    def open_pages(self, starts_empty: bool) -> None:
        """Open the latest folder of pages, or with ``starts_empty`` a new one; remove the others."""
        folders = sorted(p for p in self.path.glob("pages-*-*") if p.name.split("-")[1].isdigit())
        if starts_empty or not folders:
            number = int(folders[-1].name.split("-")[1]) + 1 if folders else 0
            # NOTE: names are never used again. SQLite removes files by path when it closes.
            folders.append(self.path / f"pages-{number:06d}-{secrets.token_hex(4)}")
            folders[-1].mkdir(mode=0o700)
        *others, self.pages = folders
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW
        self.pages_fd = os.open(self.pages, flags)
        for path in others:
            shutil.rmtree(path, ignore_errors=True)

    def release(self) -> None:
        for fd in (self.pages_fd, self._lock_fd):
            with contextlib.suppress(OSError):
                os.close(fd)
        self.pages_fd = self._lock_fd = -1

    def remove_pages(self) -> None:
        """Remove the pages, and the namespace if it is temporary. Call it before ``release``."""
        # NOTE: keep the lock file: another server may be waiting for it.
        shutil.rmtree(self.path if self.is_temporary else self.pages, ignore_errors=True)


def namespace_folder(folder: str | os.PathLike[str], namespace: str) -> Path:
    """Return the folder of ``namespace``. The first half of its name is equal for all ranks."""
    texts = namespace.partition(RANK_SEPARATOR)[0], namespace
    return Path(folder) / "-".join(hashlib.sha256(t.encode()).hexdigest()[:16] for t in texts)


def is_same_server(path: Path, other: Path) -> bool:
    """Return whether two namespaces differ only by rank."""
    return path.name.partition("-")[0] == other.name.partition("-")[0]


def claim_folder(
    folder: str | os.PathLike[str],
    namespace: str,
    *,
    is_temporary: bool = False,
    starts_empty: bool = False,
) -> FolderClaim:
    """Lock the folder of ``namespace`` below ``folder`` for this process. ``starts_empty``:
    in a new folder of pages.

    Raises ``CanopyError`` for a folder of another user or with other files, and ``FolderUnavailable`` if the
    disk is read-only or full, or another server has the lock.
    """
    store_folder, path = Path(folder), namespace_folder(folder, namespace)
    try:
        _make_store_folder(store_folder, path.name)
        path.mkdir(mode=0o700, exist_ok=True)
        _check_ours(path)
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        new_claim = FolderClaim(path, os.open(path / LOCK_FILE, flags, 0o600), is_temporary)
    except OSError as error:
        raise _make_unavailable(store_folder, error) from error
    try:
        fcntl.flock(new_claim._lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.fstat(new_claim._lock_fd).st_nlink == 0:
            raise BlockingIOError(f"{path} was removed to make room")
    except OSError as error:
        new_claim.release()
        raise FolderUnavailable(
            "locked", f"another server has {path}; end it, or give each server a folder of its own"
        ) from error
    try:
        _make_file(path / NAMESPACE_FILE, namespace)
        if is_temporary:
            (path / TEMPORARY_FILE).touch(mode=0o600)
        new_claim.open_pages(starts_empty)
    except OSError as error:
        new_claim.release()
        raise _make_unavailable(path, error) from error
    return new_claim


def _make_unavailable(path: Path, error: OSError) -> FolderUnavailable:
    return FolderUnavailable(fault_kind(error), f"{path}: {error.strerror}")


def _make_store_folder(store_folder: Path, namespace_name: str) -> None:
    """Create ``store_folder``, or check that it is a store's folder. ``namespace_name``: a folder that may exist in it."""
    if store_folder.is_symlink() or (store_folder.exists() and not store_folder.is_dir()):
        raise CanopyError(
            f"disk store: {store_folder} is not a folder; name a folder, or a new path"
        )
    if not store_folder.exists():
        store_folder.mkdir(mode=0o700, parents=True)
    names = set(os.listdir(store_folder)) - {"lost+found", namespace_name}
    foreign = sorted(name for name in names if not name.startswith(f".{MARK_FILE}."))
    if foreign and not names & {MARK_FILE, MARK_FILE + BAD_SUFFIX}:
        raise CanopyError(
            f"disk store: {store_folder} holds other files ({', '.join(foreign[:3])}); "
            "name an empty folder, or a new path"
        )
    _check_ours(store_folder)
    _make_file(store_folder / MARK_FILE, _MARK_TEXT)


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
