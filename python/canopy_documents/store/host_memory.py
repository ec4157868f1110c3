"""The host tier's memory: one allocation for all chunks, pinned if a device reads it.

A device reads rows by slot, so one kernel launch per layer fetches only the wanted rows of all
chunks of a prompt, without row numbers on the host. Memory pinned separately for each chunk would
need a launch per chunk; pinning is also slow and rounds sizes up.
"""

from __future__ import annotations

import logging
import math
import mmap
import weakref
from collections import deque
from collections.abc import Callable, Iterable, MutableMapping
from dataclasses import dataclass, field
from typing import Any

import torch

from canopy_documents.store.chunk import Chunk, Shape
from canopy_documents.store.device_copy import is_host

logger = logging.getLogger(__name__)


class PinnedPages(mmap.mmap):
    """Private pages, registered until the last tensor over them is freed."""

    release: Callable[[], None] | None = None

    def __del__(self) -> None:
        if self.release is not None:
            self.release()  # before the pages are unmapped


def pinned_tensor(tensor_shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Return uninitialised pinned memory; if CUDA cannot register it, torch's with a warning."""
    try:
        return registered_tensor(tensor_shape, dtype, torch.cuda.cudart(), torch.cuda.synchronize)
    except (RuntimeError, OSError) as error:
        logger.warning(
            "canopy: %s; torch pins the documents' memory, which may take twice its size", error
        )
        return torch.empty(tensor_shape, dtype=dtype, pin_memory=True)


def registered_tensor(
    tensor_shape: tuple[int, ...], dtype: torch.dtype, runtime: Any, wait: Callable[[], None]
) -> torch.Tensor:
    """Return a tensor over its own pages, registered with ``runtime`` (``torch.cuda.cudart()``).

    ``wait`` is called before they are released, since a device may be reading them. Raises
    RuntimeError if CUDA refuses, OSError if there is no memory.
    """
    count = math.prod(tensor_shape)
    if not count:
        return torch.empty(tensor_shape, dtype=dtype)
    nbytes = count * dtype.itemsize
    pages = PinnedPages(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    flat = torch.frombuffer(pages, dtype=dtype, count=count)
    address = flat.data_ptr()
    code = int(runtime.cudaHostRegister(address, nbytes, 0))
    if code:
        raise RuntimeError(f"cudaHostRegister of {nbytes:,} bytes failed with error {code}")

    def release() -> None:
        wait()
        runtime.cudaHostUnregister(address)

    pages.release = release
    return flat.view(tensor_shape)


Span = tuple[int, int]
"""A range of slots: first, end."""


class HostMemory:
    """``k, v [layers, slots, kv_heads, d]``: a slot is one token's KV of all layers.

    Holds at most ``capacity_bytes``. Slots are freed once their chunk has no references left, so a
    chunk that is deleted while a request uses it stays intact. All device reads and writes run on
    ``stream``, in order, so a slot is not overwritten before an earlier read is done; the host
    waits for the device before it writes.
    """

    def __init__(
        self, shape: Shape, dtype: torch.dtype, capacity_bytes: int, pin: bool = False
    ) -> None:
        bytes_per_slot = 2 * shape.layers * shape.kv_heads * shape.head_dim * dtype.itemsize
        self.slots = capacity_bytes // bytes_per_slot
        pool_shape = (shape.layers, self.slots, shape.kv_heads, shape.head_dim)
        allocate = pinned_tensor if pin else torch.empty
        self.k, self.v = (allocate(pool_shape, dtype=dtype) for _ in range(2))
        self.stream = torch.cuda.Stream() if pin else None
        self._free: list[Span] = [(0, self.slots)] if self.slots else []
        self._freed_spans: deque[list[Span]] = deque()
        """Spans of freed chunks.

        The garbage collector may free a chunk at any time: on any thread, and during this class's
        own code. A freed chunk therefore only appends its spans here, without a lock.
        """

    @property
    def free_slots(self) -> int:
        """The number of free slots. For the scheduler's thread, as :meth:`copy_in`."""
        self._reclaim()
        return sum(end - start for start, end in self._free)

    def finish(self) -> None:
        """Order the device's later work after all work on ``stream``."""
        if self.stream is not None:
            torch.cuda.current_stream().wait_stream(self.stream)

    def copy_in(self, chunk: Chunk | HostChunk) -> HostChunk | None:
        """Copy ``chunk`` into this memory; ``None`` if there is no room.

        A copy from a device is queued behind the work there, without waiting.
        """
        spans = self._allocate(len(chunk))
        if spans is None:
            return None
        host_chunk = HostChunk(chunk.ids, chunk.prefix, chunk.scores, chunk.tenant, self, spans)
        weakref.finalize(host_chunk, self._freed_spans.append, spans)
        if self.stream is None:
            self._write(chunk, spans)
        else:
            if not isinstance(chunk, Chunk) or is_host(chunk.raw_k):
                self._wait_for_reads()
            self.stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self.stream):
                self._write(chunk, spans)
                host_chunk.write_done.record()
            if isinstance(chunk, Chunk) and chunk.raw_k.is_cuda:  # its memory must outlive the copy
                chunk.raw_k.record_stream(self.stream)
                chunk.v.record_stream(self.stream)
        return host_chunk

    def _wait_for_reads(self) -> None:
        """Wait before a host-to-host copy: a device may still be reading the old rows."""
        assert self.stream is not None
        self.stream.synchronize()

    def _write(self, chunk: Chunk | HostChunk, spans: Iterable[Span]) -> None:
        for pool, source in ((self.k, chunk.raw_k), (self.v, chunk.v)):
            for layer, rows in zip(pool, source):
                offset = 0
                for start, end in spans:
                    layer[start:end].copy_(rows[offset : offset + end - start], non_blocking=True)
                    offset += end - start

    def _allocate(self, count: int) -> list[Span] | None:
        """Take ``count`` slots, first fit in few spans; ``None`` if too few are free."""
        if count > self.free_slots:
            return None
        fitting = next((i for i, (a, b) in enumerate(self._free) if b - a >= count), 0)
        taken: list[Span] = []
        while count:
            start, end = self._free.pop(fitting if fitting < len(self._free) else 0)
            step = min(count, end - start)
            taken.append((start, start + step))
            if step < end - start:
                self._free.insert(fitting, (start + step, end))
            count -= step
        return taken

    def _reclaim(self) -> None:
        """Merge returned spans into the free ones."""
        if not self._freed_spans:
            return
        free = list(self._free)
        while self._freed_spans:
            free += self._freed_spans.popleft()
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
    """A chunk in :class:`HostMemory`; has the interface of ``Chunk``.

    write_done: if a device writes it, the event after which the host may read it.
    """

    ids: tuple[int, ...]
    prefix: tuple[int, ...]
    scores: MutableMapping[str, torch.Tensor]
    tenant: str | None
    memory: HostMemory
    spans: list[Span]
    write_done: torch.cuda.Event = field(init=False)
    slots: torch.Tensor = field(init=False)
    """``[n]`` int64 on the host: each token's slot."""

    def __post_init__(self) -> None:
        no_slots = torch.empty(0, dtype=torch.long)
        self.slots = torch.cat([no_slots, *(torch.arange(a, b) for a, b in self.spans)])
        if self.memory.stream is not None:
            self.write_done = torch.cuda.Event()

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def nbytes(self) -> int:
        """Bytes of K and V."""
        return len(self) * self.memory.k[:, :1].nbytes * 2

    @property
    def raw_k(self) -> torch.Tensor:
        """All keys before RoPE, ``[layers, n, kv_heads, d]``: a copy unless they are contiguous."""
        return self._rows_of(self.memory.k)

    @property
    def v(self) -> torch.Tensor:
        """All values."""
        return self._rows_of(self.memory.v)

    def rows(self, layer: int, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return K (before RoPE) and V ``[m, kv_heads, d]`` of ``tokens [m]``, on the host."""
        self._wait()
        slots = self.slots[tokens]
        return self.memory.k[layer][slots], self.memory.v[layer][slots]

    def _rows_of(self, pool: torch.Tensor) -> torch.Tensor:
        self._wait()
        if len(self.spans) == 1:
            return pool[:, slice(*self.spans[0])]
        return pool[:, self.slots]

    def _wait(self) -> None:
        if self.memory.stream is not None:
            self.write_done.synchronize()
