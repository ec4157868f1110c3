"""Units, each of one page, in a few large files: batched positional I/O on them.

Neighbouring units of a batch become one ``pwritev`` or ``preadv``.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Sequence
from pathlib import Path

SEGMENT_BYTES = 1 << 30
_IOV_MAX = 1024

Extent = tuple[int, Sequence[memoryview]]
"""A unit and the buffers it is written from or read into."""


class SegmentFiles:
    """The files. Thread-safe as far as callers work on units of their own."""

    def __init__(self, folder: Path, unit_bytes: int) -> None:
        self.folder = folder
        self.unit_bytes = unit_bytes
        self.per_segment = max(1, SEGMENT_BYTES // unit_bytes)
        self._files: dict[int, int] = {}

    def write(self, extents: Sequence[Extent]) -> list[OSError | None]:
        """Write buffers into units; for each unit the error that kept it from being written."""
        return self._transfer(extents, _write_all, create=True)

    def read(self, extents: Sequence[Extent]) -> list[OSError | None]:
        """Fill buffers from units. A short file leaves a buffer as it was, without an error."""
        return self._transfer(extents, _read_all, create=False)

    def present(self, unit: int) -> bool:
        """Whether a file is long enough to hold ``unit``."""
        segment, index = divmod(unit, self.per_segment)
        try:
            fd = self._open(segment, create=False)
            return os.fstat(fd).st_size >= (index + 1) * self.unit_bytes
        except OSError:
            return False

    def trim(self, top: int) -> int:
        """Cut everything from unit ``top`` on off the files. Returns the bytes cut."""
        cut = 0
        for path in sorted(self.folder.glob("segment-*.kv")):
            number = path.stem.removeprefix("segment-")
            if not number.isdigit():
                continue
            keep = min(max(0, top - int(number) * self.per_segment), self.per_segment)
            keep_bytes = keep * self.unit_bytes
            size = path.stat().st_size
            if size <= keep_bytes:
                continue
            cut += size - keep_bytes
            if keep == 0:
                self._forget(int(number))
                path.unlink()
            else:
                os.ftruncate(self._open(int(number), create=False), keep_bytes)
        return cut

    def close(self) -> None:
        for number in list(self._files):
            self._forget(number)

    def _forget(self, number: int) -> None:
        fd = self._files.pop(number, None)
        if fd is not None:
            with contextlib.suppress(OSError):
                os.close(fd)

    def _transfer(
        self,
        extents: Sequence[Extent],
        move: Callable[[int, list[memoryview], int], None],
        *,
        create: bool,
    ) -> list[OSError | None]:
        outcome: list[OSError | None] = [None] * len(extents)
        for first, last in self._runs([unit for unit, _ in extents]):
            undone = first
            try:
                fd, position = self._place(extents[first][0], create=create)
                # Portions of whole pages, so that an error is that of as few as may be.
                step = max(1, _IOV_MAX // len(extents[first][1]))
                for begin in range(first, last, step):
                    end = min(begin + step, last)
                    buffers = [view for _, views in extents[begin:end] for view in views]
                    move(fd, buffers, position + (begin - first) * self.unit_bytes)
                    undone = end
            except OSError as error:
                outcome[undone:last] = [error] * (last - undone)
        return outcome

    def _runs(self, units: Sequence[int]) -> list[tuple[int, int]]:
        """Half-open ranges of ``units`` that are neighbours within one file."""
        runs, first = [], 0
        for i in range(1, len(units) + 1):
            joined = (
                i < len(units) and units[i] == units[i - 1] + 1 and units[i] % self.per_segment != 0
            )
            if not joined:
                if i > first:
                    runs.append((first, i))
                first = i
        return runs

    def _place(self, unit: int, *, create: bool) -> tuple[int, int]:
        segment, index = divmod(unit, self.per_segment)
        return self._open(segment, create=create), index * self.unit_bytes

    def _open(self, number: int, *, create: bool) -> int:
        fd = self._files.get(number)
        if fd is None:
            flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | (os.O_CREAT if create else 0)
            fd = os.open(self.folder / f"segment-{number:05d}.kv", flags, 0o600)
            other = self._files.setdefault(number, fd)
            if other != fd:  # another thread was first
                os.close(fd)
                fd = other
        return fd


def _write_all(fd: int, buffers: list[memoryview], position: int) -> None:
    while buffers:
        done = os.pwritev(fd, buffers[:_IOV_MAX], position)
        position += done
        buffers = _rest(buffers, done)


def _read_all(fd: int, buffers: list[memoryview], position: int) -> None:
    while buffers:
        done = os.preadv(fd, buffers[:_IOV_MAX], position)
        if done == 0:
            return
        position += done
        buffers = _rest(buffers, done)


def _rest(buffers: list[memoryview], done: int) -> list[memoryview]:
    """What is left of ``buffers`` after their first ``done`` bytes."""
    for i, buffer in enumerate(buffers):
        if done < len(buffer):
            return [buffer[done:], *buffers[i + 1 :]]
        done -= len(buffer)
    return []
