"""The host tier's memory: one allocation for all chunks, pinned where a device reads it.

A device reads rows of it by their slots, so one kernel launch a layer brings exactly the rows that
are wanted, of all chunks of a prompt, without the host knowing which. Memory that is pinned chunk by
chunk would need a launch each, and pinning is slow and rounds sizes up.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterable, MutableMapping
from dataclasses import dataclass, field

import torch

from canopy_chunks.store.chunk import Chunk
from canopy_chunks.store.device_copy import is_host
from canopy_chunks.store.pinned import pinned
from canopy_chunks.store.shape import Shape

Span = tuple[int, int]
"""Slots from the first to before the second."""


class HostMemory:
    """``k, v [layers, slots, kv_heads, d]``: a slot is one token's KV of all layers.

    At most ``capacity_bytes``. Slots come back when the chunk that held them is gone everywhere, so
    a chunk that is deleted while a request uses it stays whole. Reads and writes by a device are all
    on ``stream``, in order, so a slot is not written anew before an earlier read of it is done; the
    host waits for the device before it writes itself.
    """

    def __init__(
        self, shape: Shape, dtype: torch.dtype, capacity_bytes: int, pin: bool = False
    ) -> None:
        token = 2 * shape.layers * shape.kv_heads * shape.head_dim * dtype.itemsize
        self.slots = capacity_bytes // token
        size = (shape.layers, self.slots, shape.kv_heads, shape.head_dim)
        make = pinned if pin else torch.empty
        self.k, self.v = (make(size, dtype=dtype) for _ in range(2))
        self.stream = torch.cuda.Stream() if pin else None
        self._free: list[Span] = [(0, self.slots)] if self.slots else []
        self._returned: deque[list[Span]] = deque()
        """Of chunks that are gone. They go on any thread, and at any point of this class's own code: the
        garbage collector runs where it likes. So they only leave their spans here, and wait for nothing."""

    @property
    def free_slots(self) -> int:
        """Slots that no chunk holds. For the scheduler's thread, as :meth:`hold`."""
        self._take_back()
        return sum(end - start for start, end in self._free)

    def finish(self) -> None:
        """What a device is given from here on runs after all that is on ``stream``."""
        if self.stream is not None:
            torch.cuda.current_stream().wait_stream(self.stream)

    def hold(self, chunk: Chunk | HostChunk) -> HostChunk | None:
        """A copy of ``chunk`` here; ``None`` where there is no room.

        From a device it is copied behind what is queued there, and not waited for.
        """
        spans = self._take(len(chunk))
        if spans is None:
            return None
        held = HostChunk(chunk.ids, chunk.prefix, chunk.scores, chunk.document, self, spans)
        weakref.finalize(held, self._returned.append, spans)
        if self.stream is None:
            self._write(chunk, spans)
        else:
            if not isinstance(chunk, Chunk) or is_host(chunk.raw_k):
                self._wait_for_reads()
            self.stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self.stream):
                self._write(chunk, spans)
                held.written.record()
            if isinstance(chunk, Chunk) and chunk.raw_k.is_cuda:  # its memory outlives the copy
                chunk.raw_k.record_stream(self.stream)
                chunk.v.record_stream(self.stream)
        return held

    def _wait_for_reads(self) -> None:
        """A copy from host to host is made at once, and a device may still read what lay there."""
        assert self.stream is not None
        self.stream.synchronize()

    def _write(self, chunk: Chunk | HostChunk, spans: Iterable[Span]) -> None:
        for here, there in ((self.k, chunk.raw_k), (self.v, chunk.v)):
            for layer, rows in zip(here, there):
                at = 0
                for start, end in spans:
                    layer[start:end].copy_(rows[at : at + end - start], non_blocking=True)
                    at += end - start

    def _take(self, count: int) -> list[Span] | None:
        """``count`` slots in as few spans as a first fit gives; ``None`` if that many are not free."""
        if count > self.free_slots:
            return None
        whole = next((i for i, (a, b) in enumerate(self._free) if b - a >= count), 0)
        taken: list[Span] = []
        while count:
            start, end = self._free.pop(whole if whole < len(self._free) else 0)
            step = min(count, end - start)
            taken.append((start, start + step))
            if step < end - start:
                self._free.insert(whole, (start + step, end))
            count -= step
        return taken

    def _take_back(self) -> None:
        """Join the spans that were given back to the free ones."""
        if not self._returned:
            return
        free = list(self._free)
        while self._returned:
            free += self._returned.popleft()
        merged: list[Span] = []
        for start, end in sorted(free):
            assert not merged or start >= merged[-1][1], "a slot was given back twice"
            if merged and start == merged[-1][1]:
                merged[-1] = (merged[-1][0], end)
            else:
                merged.append((start, end))
        self._free = merged


@dataclass(slots=True, eq=False, weakref_slot=True)
class HostChunk:
    """A chunk in :class:`HostMemory`; stands in for a ``Chunk``.

    written: where a device writes it, the event after which the host may read it.
    """

    ids: tuple[int, ...]
    prefix: tuple[int, ...]
    scores: MutableMapping[str, torch.Tensor]
    document: str
    memory: HostMemory
    spans: list[Span]
    written: torch.cuda.Event = field(init=False)
    slots: torch.Tensor = field(init=False)
    """``[n]`` int64 on the host: where each token lies."""

    def __post_init__(self) -> None:
        none = torch.empty(0, dtype=torch.long)
        self.slots = torch.cat([none, *(torch.arange(a, b) for a, b in self.spans)])
        if self.memory.stream is not None:
            self.written = torch.cuda.Event()

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def nbytes(self) -> int:
        """Bytes of K and V."""
        return len(self) * self.memory.k[:, :1].nbytes * 2

    @property
    def raw_k(self) -> torch.Tensor:
        """All keys before RoPE, ``[layers, n, kv_heads, d]``: a copy unless they lie in one run."""
        return self._all(self.memory.k)

    @property
    def v(self) -> torch.Tensor:
        """All values."""
        return self._all(self.memory.v)

    def rows(self, layer: int, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """K (before RoPE) and V ``[m, kv_heads, d]`` of one layer's ``tokens [m]``, on the host."""
        self._wait()
        at = self.slots[tokens]
        return self.memory.k[layer][at], self.memory.v[layer][at]

    def _all(self, of: torch.Tensor) -> torch.Tensor:
        self._wait()
        if len(self.spans) == 1:
            return of[:, slice(*self.spans[0])]
        return of[:, self.slots]

    def _wait(self) -> None:
        if self.memory.stream is not None:
            self.written.synchronize()
