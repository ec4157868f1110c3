"""Data transfers: a link with a fixed rate, and a disk whose reads and writes may share bandwidth.

Both are computed when asked, not event by event."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from typing import Any

from canopy_lab.sim.system.tier_spec import TierSpec


class Link:
    """Transfers one after another, in each direction or, on a shared channel, in both."""

    def __init__(self, spec: TierSpec) -> None:
        self._spec = spec
        self._read_free_s = self._write_free_s = 0.0
        self.read_bytes = self.written_bytes = 0.0

    def read(self, now: float, size: float) -> tuple[float, float]:
        """Begin and end of a transfer to the device that is asked for ``now``."""
        spec = self._spec
        begin = max(now, self._read_free_s)
        end = begin + spec.latency_s + size / spec.read_bytes_per_s
        self._read_free_s = end
        if spec.shared_channel:
            self._write_free_s = end
        self.read_bytes += size
        return begin, end

    def read_s(self, size: float) -> float:
        """Seconds that a transfer to the device takes, without what is in the way."""
        return self._spec.latency_s + size / self._spec.read_bytes_per_s

    def write(self, now: float, size: float) -> tuple[float, float]:
        """The same for a copy from the device."""
        spec = self._spec
        begin = max(now, self._write_free_s)
        end = begin + spec.latency_s + size / spec.write_bytes_per_s
        self._write_free_s = end
        if spec.shared_channel:
            self._read_free_s = end
        self.written_bytes += size
        return begin, end


class Transfer:
    """One read or write of a disk."""

    __slots__ = ("begin_s", "bytes", "end_s", "left", "payload", "size")

    def __init__(self, size: float, overhead: float, payload: Any = None) -> None:
        self.size = size
        """Bytes that are moved; ``bytes`` and ``left`` have the latency beside them."""
        size += overhead
        self.bytes = size
        self.left = size
        self.begin_s = math.nan
        self.end_s = math.inf
        self.payload = payload

    @property
    def done_share(self) -> float:
        return 1.0 - self.left / self.bytes if self.bytes else 1.0


class DiskChannel:
    """Reads in order and writes in order, side by side.

    On a shared channel each gets half of its rate while the other is busy too: what the disk
    gives reads and writes is one budget. ``written`` hears of each write's end.
    """

    def __init__(
        self,
        spec: TierSpec,
        written: Callable[[Transfer], None] | None = None,
    ) -> None:
        self._spec = spec
        self._written = written
        self._queues: tuple[deque[Transfer], deque[Transfer]] = (deque(), deque())
        self._rates = (spec.read_bytes_per_s, spec.write_bytes_per_s)
        self._now = 0.0
        self.read_bytes = 0.0
        self._to_write = 0.0
        """Bytes that were to be written so far."""

    @property
    def written_bytes(self) -> float:
        """What has been written by now."""
        return self._to_write - sum(t.size * (1.0 - t.done_share) for t in self._queues[1])

    @property
    def writing(self) -> bool:
        """Whether a write is under way."""
        return bool(self._queues[1])

    @property
    def busy(self) -> bool:
        """Whether anything is under way, as of the last look."""
        return bool(self._queues[0] or self._queues[1])

    def read(self, now: float, size: float, payload: Any = None) -> Transfer:
        """Queue a read."""
        return self._add(0, now, size, payload)

    def write(self, now: float, size: float, payload: Any = None) -> Transfer:
        """Queue a write."""
        return self._add(1, now, size, payload)

    def cancel(self, transfer: Transfer, now: float) -> None:
        """Give up what is left of a read; what is read already has cost its time."""
        self.advance(now)
        if transfer in self._queues[0]:
            self._queues[0].remove(transfer)
            self._start(0)
        self.read_bytes -= transfer.left

    def estimate(self, transfer: Transfer, now: float) -> float:
        """When a read will end if nothing else comes."""
        self.advance(now)
        if transfer.end_s < math.inf:
            return transfer.end_s
        before = 0.0
        for other in self._queues[0]:
            before += other.left
            if other is transfer:
                break
        rate, write_rate = self._rates
        if not self._spec.shared_channel:
            return now + before / rate
        both = sum(t.left for t in self._queues[1]) / (write_rate / 2)
        if before / (rate / 2) <= both:
            return now + before / (rate / 2)
        return now + both + (before - both * rate / 2) / rate

    def advance(self, now: float) -> None:
        """Work off what ends by ``now``."""
        if now <= self._now:
            return
        reads, writes = self._queues
        while (reads or writes) and self._now < now:
            half = 0.5 if self._spec.shared_channel and reads and writes else 1.0
            read_rate, write_rate = self._rates[0] * half, self._rates[1] * half
            step = now - self._now
            if reads:
                step = min(step, reads[0].left / read_rate)
            if writes:
                step = min(step, writes[0].left / write_rate)
            self._now += step
            if reads:
                self._work(0, step * read_rate)
            if writes:
                self._work(1, step * write_rate)
        if now > self._now:
            self._now = now

    def _work(self, which: int, size: float) -> None:
        queue = self._queues[which]
        transfer = queue[0]
        transfer.left -= size
        # A remainder below a byte is rounding.
        if transfer.left < 1.0:
            transfer.left = 0.0
            transfer.end_s = self._now
            queue.popleft()
            self._start(which)
            if which and self._written is not None:
                self._written(transfer)

    def _add(self, which: int, now: float, size: float, payload: Any) -> Transfer:
        self.advance(now)
        if which:
            self._to_write += size
        else:
            self.read_bytes += size
        overhead = self._spec.latency_s * self._rates[which] if size else 0.0
        transfer = Transfer(size, overhead, payload)
        self._queues[which].append(transfer)
        self._start(which)
        return transfer

    def _start(self, which: int) -> None:
        queue = self._queues[which]
        if queue and math.isnan(queue[0].begin_s):
            queue[0].begin_s = self._now
