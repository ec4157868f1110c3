"""A policy's learnt state: read once for all ranks, saved by one server for the next start."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import logging
import os
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from sglang_canopy.errors import CanopyError
from sglang_canopy.policy.base import Policy
from sglang_canopy.private_file import replace_file, set_aside
from sglang_canopy.ranks import from_first
from sglang_canopy.reuse import saved_curves

logger = logging.getLogger(__name__)

EVERY_S = 30.0
"""Seconds between two saves. SGLang kills its schedulers, so a save at exit is not enough."""


def peek(path: str) -> Any:
    """Return the state in a profile; ``None`` if it was never saved or is damaged.

    Raises ``CanopyError`` if the path cannot be a profile.
    """
    with contextlib.suppress(saved_curves.Damaged):
        return _checked(path)


def read_or_set_aside(path: str) -> Any:
    """Return the state as :func:`peek`, but set a damaged profile aside."""
    try:
        return _checked(path)
    except saved_curves.Damaged as error:
        set_aside(path, error)
        return None


def _checked(path: str) -> Any:
    state = saved_curves.read(path)
    if state is not None:
        saved_curves.check(state)
    return state


def from_first_rank(path: str | None, group: Any) -> Any:
    """Return the first rank's ``read_or_set_aside(path)`` on every rank of ``group``; ``None``
    without a path there.

    Ranks may run on several machines, and a rank that started from another profile would evict
    differently. Collective; ``group``: a process group for CPU tensors, ``None`` for one rank. All
    ranks raise the first rank's ``CanopyError``.
    """
    found: Any = None
    if group is None or torch.distributed.get_rank(group=group) == 0:
        try:
            found = None if path is None else read_or_set_aside(path)
        except CanopyError as error:
            found = error
    found = found if group is None else from_first([group], found)
    if isinstance(found, CanopyError):
        raise found
    return found


class Profile:
    """A JSON file with a policy's learnt state: written atomically, readable only by its owner.

    If several servers share a profile, the first one saves. The others learn separately, and one of
    them takes over when that server ends: its lock on a file next to the profile ends with the
    process.
    """

    def __init__(self, path: str) -> None:
        self.path = Path(path)
        self._lock: int | None = None
        self._saved_at = float("-inf")
        self._logged: set[str] = set()
        self._writing = threading.Lock()
        self.writer: threading.Thread | None = None
        """Thread that writes the file, so that the scheduler does not wait for the disk."""

    def claim(self) -> bool:
        """Try to take the lock. Returns whether this server saves the profile."""
        if self._lock is not None:
            return True
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        lock = os.open(self.path.parent / f".{self.path.name}.lock", flags, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
                os.close(lock)
                self._warn_once(
                    "another server saves the policy's profile to %s; this one does when that "
                    "one has ended, or give it a profile of its own",
                    self.path,
                )
                return False
            # A file system without locks: the last save wins, and each save is atomic.
        self._lock = lock
        return True

    def release(self) -> None:
        """Release the lock, so that another server can save."""
        if self._lock is not None:
            with contextlib.suppress(OSError):
                os.close(self._lock)
            self._lock = None

    @property
    def saves(self) -> bool:
        """Whether this server held the lock at the last attempt."""
        return self._lock is not None

    def save_sometimes(self, policy: Policy, now: float) -> None:
        """Save on a thread, if the last save is at least ``EVERY_S`` ago.

        ``now`` is on the requests' clock. Skipped while the previous save is still being written.
        """
        if now - self._saved_at < EVERY_S or self._writing.locked():
            return
        self._saved_at = now
        state = policy.state()
        self.writer = threading.Thread(target=self._write, args=(state,), daemon=True)
        self.writer.start()

    def save(self, policy: Policy) -> None:
        """Write the state, unless another server saves it. A failure is logged once."""
        self._write(policy.state())

    def _write(self, state: Mapping[str, Any] | None) -> None:
        if not state:
            return
        try:
            with self._writing:
                if self.claim():
                    replace_file(self.path, json.dumps(state), durable=True)
        except OSError as error:
            self._warn_once("cannot save the policy's profile to %s: %s", self.path, error)

    def _warn_once(self, message: str, *arguments: Any) -> None:
        if message not in self._logged:
            self._logged.add(message)
            logger.warning(message, *arguments)
