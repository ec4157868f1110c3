"""Segment files: units of one page each in a few large files, with batched positional I/O.

Adjacent units of a batch share one ``pwritev`` or ``preadv``. Files are opened relative to the folder's
descriptor, so another folder at the same path is never written to.
"""

from __future__ import annotations

import contextlib
import errno
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from fnmatch import fnmatch

SEGMENT_BYTES = 1 << 30
_MAX_BUFFERS_PER_CALL = 1024

Extent = tuple[int, Sequence[memoryview]]
"""A unit, and the buffers to write from or read into."""


class SegmentFiles:
    """Files in the folder of the descriptor ``folder_fd``, which is duplicated. Thread-safe if
    concurrent calls work on different units."""

    def __init__(self, folder_fd: int, unit_bytes: int) -> None:
        self.unit_bytes = unit_bytes
        self.units_per_segment = max(1, SEGMENT_BYTES // unit_bytes)
        self._folder_fd = os.dup(folder_fd)
        self._fd_by_segment: dict[int, int] = {}
        self._unit_counts: dict[int, int] = {}
        """Whole units of each file at the first call of ``is_present``: valid while pages are loaded only."""
        self._lock = threading.Lock()
        self._transfers = 0
        self._is_closed = False

    def write(self, extents: Sequence[Extent]) -> list[OSError | None]:
        """Write buffers into units. Returns the error of each unit, or ``None``."""
        return self._transfer(extents, _write_all, create=True)

    def read(self, extents: Sequence[Extent]) -> list[OSError | None]:
        """Fill buffers from units. Past the end of a file, buffers stay unchanged without an error."""
        return self._transfer(extents, _read_all, create=False)

    def is_present(self, unit: int) -> bool:
        """Return whether the file of ``unit`` is long enough to contain it."""
        segment, unit_in_segment = divmod(unit, self.units_per_segment)
        if segment not in self._unit_counts:
            self._unit_counts[segment] = self._count_units(segment)
        return unit_in_segment < self._unit_counts[segment]

    def _count_units(self, segment: int) -> int:
        """Return the whole units in a file, 0 without the file."""
        try:
            return os.fstat(self._open(segment, create=False)).st_size // self.unit_bytes
        except OSError:
            return 0

    def trim(self, end_unit: int) -> int:
        """Truncate the files at unit ``end_unit``. Returns the bytes removed."""
        removed_bytes = 0
        for name in sorted(os.listdir(self._folder_fd)):
            segment = name.removeprefix("segment-").removesuffix(".kv")
            if not fnmatch(name, "segment-*.kv") or not segment.isdigit():
                continue
            first_unit = int(segment) * self.units_per_segment
            kept_units = min(max(0, end_unit - first_unit), self.units_per_segment)
            kept_bytes = kept_units * self.unit_bytes
            size_bytes = os.stat(name, dir_fd=self._folder_fd).st_size
            if size_bytes <= kept_bytes:
                continue
            removed_bytes += size_bytes - kept_bytes
            if kept_units == 0:
                self._close_file(int(segment))
                os.unlink(name, dir_fd=self._folder_fd)
            else:
                os.ftruncate(self._open(int(segment), create=False), kept_bytes)
        return removed_bytes

    def close(self) -> None:
        """Close the files after the last transfer: the system reuses descriptor numbers."""
        with self._lock:
            self._is_closed = True
            if not self._transfers:
                self._close_files()

    @contextlib.contextmanager
    def _hold_open(self) -> Iterator[bool]:
        """Keep the files open. Yields false if they are closed already."""
        with self._lock:
            is_open = not self._is_closed
            self._transfers += is_open
        try:
            yield is_open
        finally:
            with self._lock:
                self._transfers -= is_open
                if self._is_closed and not self._transfers:
                    self._close_files()

    def _close_files(self) -> None:
        for segment in list(self._fd_by_segment):
            self._close_file(segment)
        if self._folder_fd >= 0:
            os.close(self._folder_fd)
            self._folder_fd = -1

    def _close_file(self, segment: int) -> None:
        fd = self._fd_by_segment.pop(segment, None)
        if fd is not None:
            with contextlib.suppress(OSError):
                os.close(fd)

    def _transfer(
        self,
        extents: Sequence[Extent],
        transfer_all: Callable[[int, list[memoryview], int], None],
        *,
        create: bool,
    ) -> list[OSError | None]:
        errors: list[OSError | None] = [None] * len(extents)
        with self._hold_open() as is_open:
            if not is_open:
                return [OSError(errno.EBADF, "the files are closed")] * len(extents)
            for first, end in self._find_runs([unit for unit, _ in extents]):
                first_undone = first
                try:
                    first_unit, first_buffers = extents[first]
                    segment, unit_in_segment = divmod(first_unit, self.units_per_segment)
                    fd = self._open(segment, create=create)
                    # Transfer in small groups of whole pages, so that an error affects few pages.
                    group_pages = max(1, _MAX_BUFFERS_PER_CALL // len(first_buffers))
                    for start in range(first, end, group_pages):
                        stop = min(start + group_pages, end)
                        buffers = [view for _, views in extents[start:stop] for view in views]
                        offset = (unit_in_segment + start - first) * self.unit_bytes
                        transfer_all(fd, buffers, offset)
                        first_undone = stop
                except OSError as error:
                    errors[first_undone:end] = [error] * (end - first_undone)
        return errors

    def _find_runs(self, units: Sequence[int]) -> list[tuple[int, int]]:
        """Return half-open ranges of ``units`` that are adjacent within one file."""
        runs, first = [], 0
        for i in range(1, len(units) + 1):
            is_adjacent = (
                i < len(units)
                and units[i] == units[i - 1] + 1
                and units[i] % self.units_per_segment != 0
            )
            if not is_adjacent:
                if i > first:
                    runs.append((first, i))
                first = i
        return runs

    def _open(self, segment: int, *, create: bool) -> int:
        fd = self._fd_by_segment.get(segment)
        if fd is None:
            flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | (os.O_CREAT if create else 0)
            fd = os.open(_file_name(segment), flags, 0o600, dir_fd=self._folder_fd)
            first_fd = self._fd_by_segment.setdefault(segment, fd)
            if first_fd != fd:  # another thread was first
                os.close(fd)
                fd = first_fd
        return fd


def _file_name(segment: int) -> str:
    return f"segment-{segment:05d}.kv"


def _write_all(fd: int, buffers: list[memoryview], offset: int) -> None:
    while buffers:
        written_bytes = os.pwritev(fd, buffers[:_MAX_BUFFERS_PER_CALL], offset)
        offset += written_bytes
        buffers = _remaining_buffers(buffers, written_bytes)


def _read_all(fd: int, buffers: list[memoryview], offset: int) -> None:
    while buffers:
        read_bytes = os.preadv(fd, buffers[:_MAX_BUFFERS_PER_CALL], offset)
        if read_bytes == 0:
            return
        offset += read_bytes
        buffers = _remaining_buffers(buffers, read_bytes)


def _remaining_buffers(buffers: list[memoryview], done_bytes: int) -> list[memoryview]:
    """Return ``buffers`` without their first ``done_bytes`` bytes."""
    for i, buffer in enumerate(buffers):
        if done_bytes < len(buffer):
            return [buffer[done_bytes:], *buffers[i + 1 :]]
        done_bytes -= len(buffer)
    return []
