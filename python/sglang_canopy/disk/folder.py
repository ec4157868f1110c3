"""The store's folder: ours or refused, private, and one server's at a time."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from sglang_canopy.errors import CanopyError
from sglang_canopy.private_file import BAD, replace_file, set_aside

MARK = "CANOPY-DISK-STORE"
_MARK_TEXT = "sglang-canopy disk store, version 1\n"
_LOCK = "lock"
_NAMESPACE = "namespace"
_TEMPORARY = "temporary"
"""A file in folders that no later server will ask for."""


class Unavailable(Exception):
    """The folder cannot be used now, for a reason that is not a mistake: run without it."""

    def __init__(self, fault: str, why: str) -> None:
        super().__init__(why)
        self.fault = fault


@dataclass(slots=True)
class Claim:
    """A namespace's own folder, locked for this process."""

    path: Path
    _lock: int
    temporary: bool = False

    def release(self) -> None:
        with contextlib.suppress(OSError):
            os.close(self._lock)

    def remove_pages(self) -> None:
        """Free the disk space, while nobody else can have the folder."""
        if self.temporary:
            shutil.rmtree(self.path, ignore_errors=True)
            return
        # NOTE: the lock's file stays: another server may be waiting for it.
        for pattern in ("segment-*.kv", "index.sqlite*"):
            for file in self.path.glob(pattern):
                with contextlib.suppress(OSError):
                    file.unlink()


def claim(folder: str | os.PathLike[str], namespace: str, *, temporary: bool = False) -> Claim:
    """Take ``folder``/namespace for this process.

    Raises ``CanopyError`` for a folder that is not ours to write to, and ``Unavailable`` where
    the disk is read-only or full, or another server has the folder.
    """
    top = Path(folder)
    try:
        _make_top(top)
        path = top / hashlib.sha256(namespace.encode()).hexdigest()[:24]
        path.mkdir(mode=0o700, exist_ok=True)
        _check_ours(path)
        fd = os.open(path / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        from sglang_canopy.disk.journal import kind_of

        raise Unavailable(kind_of(error), f"{top}: {error.strerror}") from error
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(fd)
        raise Unavailable(
            "locked",
            f"another server has {path}; end it, or give each server a folder of its own",
        ) from error
    try:
        _make_file(path / _NAMESPACE, namespace)
        if temporary:
            (path / _TEMPORARY).touch(mode=0o600)
    except OSError as error:
        os.close(fd)
        from sglang_canopy.disk.journal import kind_of

        raise Unavailable(kind_of(error), f"{path}: {error.strerror}") from error
    return Claim(path, fd, temporary)


def remove_abandoned(folder: Path) -> list[Path]:
    """Remove temporary namespaces below ``folder`` whose servers are gone; returns which."""
    removed = []
    for mark in folder.glob(f"*/{_TEMPORARY}"):
        with contextlib.suppress(OSError):
            fd = os.open(mark.parent / _LOCK, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(mark.parent, ignore_errors=True)
                removed.append(mark.parent)
            finally:
                os.close(fd)
    return removed


def other_namespaces(folder: Path, mine: Path) -> dict[Path, int]:
    """Other models' folders below ``folder`` -> bytes of their pages on disk."""
    found: dict[Path, int] = {}
    for path in folder.iterdir():
        if path != mine and (path / _NAMESPACE).is_file():
            with contextlib.suppress(OSError):
                found[path] = sum(f.stat().st_size for f in path.glob("segment-*.kv"))
    return found


def _make_top(top: Path) -> None:
    if top.is_symlink() or (top.exists() and not top.is_dir()):
        raise CanopyError(f"disk store: {top} is not a folder; name a folder, or a new path")
    if not top.exists():
        top.mkdir(mode=0o700, parents=True)
    names = set(os.listdir(top)) - {"lost+found"}
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
    """See to it that ``path`` holds ``text``. An empty file is one that is yet to be made."""
    with contextlib.suppress(FileNotFoundError):
        found = path.read_bytes()
        if found == text.encode():
            return
        if found:
            set_aside(path, "damaged, or of another version")
    replace_file(path, text, durable=True)
