"""Data transfers: a link with a fixed rate, and a disk whose reads and writes may share bandwidth.

Both are computed on demand, without events.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from typing import Any

from canopy_lab.sim.system.tier_spec import TierSpec


class Link:
    """Serial transfers: one queue per direction, or one queue if the channel is shared."""

    def __init__(self, spec: TierSpec) -> None:
        self._spec = spec
        self._read_free_s = self._write_free_s = 0.0

    def read(self, now: float, transfer_bytes: float) -> tuple[float, float]:
        """Queue a transfer to the device; return its begin and end, in seconds."""
        spec = self._spec
        start_s = max(now, self._read_free_s)
        end_s = start_s + spec.latency_s + transfer_bytes / spec.read_bytes_per_s
        self._read_free_s = end_s
        if spec.shared_channel:
            self._write_free_s = end_s
        return start_s, end_s

    def read_s(self, transfer_bytes: float) -> float:
        """Return the seconds of a transfer to the device, without queueing."""
        return self._spec.latency_s + transfer_bytes / self._spec.read_bytes_per_s

    def write(self, now: float, transfer_bytes: float) -> tuple[float, float]:
        """Queue a copy from the device; return its begin and end, in seconds."""
        spec = self._spec
        start_s = max(now, self._write_free_s)
        end_s = start_s + spec.latency_s + transfer_bytes / spec.write_bytes_per_s
        self._write_free_s = end_s
        if spec.shared_channel:
            self._read_free_s = end_s
        return start_s, end_s


class DiskIO:
    """One read or write of a disk."""

    __slots__ = ("begin_s", "end_s", "payload", "payload_bytes", "remaining_bytes", "total_bytes")

    def __init__(self, payload_bytes: float, overhead_bytes: float, payload: Any = None) -> None:
        self.payload_bytes = payload_bytes
        self.total_bytes = self.remaining_bytes = payload_bytes + overhead_bytes
        """Bytes to transfer, with the latency as bytes."""
        self.begin_s = math.nan
        self.end_s = math.inf
        self.payload = payload

    @property
    def done_share(self) -> float:
        return 1.0 - self.remaining_bytes / self.total_bytes if self.total_bytes else 1.0


_READ, _WRITE = 0, 1
"""Directions: indices of a disk's queues and rates."""


class DiskChannel:
    """A FIFO queue of reads and one of writes, processed concurrently.

    On a shared channel each gets half of its rate while both are busy. ``on_written`` is called at the
    end of each write.
    """

    def __init__(self, spec: TierSpec, on_written: Callable[[DiskIO], None] | None = None) -> None:
        self._spec = spec
        self._on_written = on_written
        self._queues: tuple[deque[DiskIO], deque[DiskIO]] = (deque(), deque())
        self._rates = (spec.read_bytes_per_s, spec.write_bytes_per_s)
        self._now = 0.0
        self.read_bytes = 0.0
        self._queued_write_bytes = 0.0
        """Bytes of all writes queued so far."""

    @property
    def written_bytes(self) -> float:
        left_bytes = sum(io.payload_bytes * (1.0 - io.done_share) for io in self._queues[_WRITE])
        return self._queued_write_bytes - left_bytes

    @property
    def is_writing(self) -> bool:
        return bool(self._queues[_WRITE])

    @property
    def is_busy(self) -> bool:
        """True if a transfer was queued at the last ``advance``."""
        return any(self._queues)

    def read(self, now: float, payload_bytes: float, payload: Any = None) -> DiskIO:
        return self._queue(_READ, now, payload_bytes, payload)

    def write(self, now: float, payload_bytes: float, payload: Any = None) -> DiskIO:
        return self._queue(_WRITE, now, payload_bytes, payload)

    def cancel(self, transfer: DiskIO, now: float) -> None:
        """Cancel the rest of a read; the part already read has used its time."""
        self.advance(now)
        if transfer in self._queues[_READ]:
            self._queues[_READ].remove(transfer)
            self._start_next(_READ)
        self.read_bytes -= transfer.remaining_bytes

    def estimate_end_s(self, transfer: DiskIO, now: float) -> float:
        """Return the end of a read, in seconds, without further arrivals."""
        self.advance(now)
        if transfer.end_s < math.inf:
            return transfer.end_s
        queued_bytes = 0.0
        for read in self._queues[_READ]:
            queued_bytes += read.remaining_bytes
            if read is transfer:
                break
        read_rate, write_rate = self._rates
        if not self._spec.shared_channel:
            return now + queued_bytes / read_rate
        shared_s = sum(write.remaining_bytes for write in self._queues[_WRITE]) / (write_rate / 2)
        if queued_bytes / (read_rate / 2) <= shared_s:
            return now + queued_bytes / (read_rate / 2)
        return now + shared_s + (queued_bytes - shared_s * read_rate / 2) / read_rate

    def advance(self, now: float) -> None:
        """Process transfers up to ``now``."""
        if now <= self._now:
            return
        reads, writes = self._queues
        while (reads or writes) and self._now < now:
            rate_share = 0.5 if self._spec.shared_channel and reads and writes else 1.0
            read_rate, write_rate = (rate * rate_share for rate in self._rates)
            step_s = now - self._now
            if reads:
                step_s = min(step_s, reads[0].remaining_bytes / read_rate)
            if writes:
                step_s = min(step_s, writes[0].remaining_bytes / write_rate)
            self._now += step_s
            if reads:
                self._advance_head(_READ, step_s * read_rate)
            if writes:
                self._advance_head(_WRITE, step_s * write_rate)
        if now > self._now:
            self._now = now

    def _advance_head(self, direction: int, moved_bytes: float) -> None:
        queue = self._queues[direction]
        transfer = queue[0]
        transfer.remaining_bytes -= moved_bytes
        # A remainder below a byte is rounding.
        if transfer.remaining_bytes < 1.0:
            transfer.remaining_bytes = 0.0
            transfer.end_s = self._now
            queue.popleft()
            self._start_next(direction)
            if direction == _WRITE and self._on_written is not None:
                self._on_written(transfer)

    def _queue(self, direction: int, now: float, payload_bytes: float, payload: Any) -> DiskIO:
        self.advance(now)
        if direction == _WRITE:
            self._queued_write_bytes += payload_bytes
        else:
            self.read_bytes += payload_bytes
        overhead_bytes = self._spec.latency_s * self._rates[direction] if payload_bytes else 0.0
        transfer = DiskIO(payload_bytes, overhead_bytes, payload)
        self._queues[direction].append(transfer)
        self._start_next(direction)
        return transfer

    def _start_next(self, direction: int) -> None:
        queue = self._queues[direction]
        if queue and math.isnan(queue[0].begin_s):
            queue[0].begin_s = self._now
