"""Read chunks from disk before they are needed.

:class:`ReadAhead` reads whole chunks while their request waits to be scheduled;
:func:`read_layers_ahead` reads the others one layer ahead of their use. Neither changes the result.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import torch

from canopy_chunks.store.chunk import Chunk
from canopy_chunks.store.disk import DiskChunk
from canopy_chunks.store.host_memory import HostChunk
from canopy_chunks.store.suffix import ChunkSuffix, base_and_skip
from sglang_canopy.errors import CanopyError

LAYERS_AHEAD = 4
"""Layers whose records are requested from the disk in advance: the depth of its queue."""

LayerRows = list[tuple[torch.Tensor, torch.Tensor]]

Stored = Chunk | HostChunk | DiskChunk | ChunkSuffix
"""A chunk from the store: in memory, in a file, or the suffix of a chunk."""


@dataclass(slots=True)
class _PendingRead:
    """A chunk being read, or already read: its bytes, and the requests that wait for it."""

    size: int
    waiters: weakref.WeakSet[Any] = field(default_factory=weakref.WeakSet)
    future: Future[Chunk | None] = field(default_factory=Future)

    def read(self, chunk: DiskChunk) -> Chunk | None:
        """Read the chunk into memory, on the reader's thread; None without waiting requests."""
        return chunk.load() if self.waiters else None


class ReadAhead:
    """Reads the chunks of waiting requests into memory, in order of arrival.

    At most ``capacity_bytes`` at a time; chunks beyond that are read when they are needed. A chunk
    is dropped once no request waits for it: planned requests release it, aborted ones are
    garbage-collected. One thread of its own; all methods are for the scheduler's thread.
    """

    def __init__(self, capacity_bytes: int) -> None:
        self.capacity_bytes, self.used_bytes = capacity_bytes, 0
        self.requested = self.taken = self.left_out = 0
        self.pending: dict[str, _PendingRead] = {}
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="canopy-chunk-reader")

    def request(self, key: str, chunk: DiskChunk, waiter: Any) -> None:
        """Start to read a chunk for ``waiter``, the request that will use it (held weakly)."""
        one = self.pending.get(key)
        if one is None:
            self.drop_unneeded()
            if self.used_bytes + chunk.nbytes > self.capacity_bytes:
                self.left_out += 1
                return
            one = _PendingRead(chunk.nbytes)
        one.waiters.add(waiter)  # before it is read: a chunk without waiters is skipped
        if key not in self.pending:
            self.pending[key] = one
            self.used_bytes += one.size
            self.requested += 1
            one.future = self._thread.submit(one.read, chunk)

    def take(self, key: str) -> Chunk | None:
        """Return the chunk if it was read or is being read; with ``None`` the caller reads its
        file.

        ``None`` also for a damaged file: the caller's read then raises the error.
        """
        one = self.pending.get(key)
        if (
            one is None or one.future.cancel()
        ):  # not started: reading only the wanted rows is less work
            return None
        try:
            chunk = one.future.result()
        except CanopyError:
            return None
        self.taken += chunk is not None
        return chunk

    def release(self, waiter: Any) -> None:
        """Release a request's chunks: it was planned, or it runs normally."""
        for one in self.pending.values():
            one.waiters.discard(waiter)
        self.drop_unneeded()

    def drop_unneeded(self) -> None:
        """Drop chunks without waiting requests."""
        for key in [key for key, one in self.pending.items() if not one.waiters]:
            one = self.pending.pop(key)
            one.future.cancel()
            self.used_bytes -= one.size

    def clear(self) -> None:
        """Drop all chunks."""
        for one in self.pending.values():
            one.waiters.clear()
        self.drop_unneeded()

    def stats(self) -> dict[str, int]:
        """Return the chunks requested, taken and omitted since the start; bytes held now."""
        self.drop_unneeded()
        return {
            "asked": self.requested,
            "taken": self.taken,
            "left_out": self.left_out,
            "used_bytes": self.used_bytes,
        }


def read_layers_ahead(
    parts: Sequence[tuple[Stored, torch.Tensor]], layers: int
) -> Iterator[LayerRows]:
    """Yield K (before RoPE) and V of the tokens of each ``(chunk, tokens)``, as one list per layer.

    For chunks on disk, the next layer is read and checked while the caller uses this one, and up to
    ``LAYERS_AHEAD`` layers are requested from the disk. Raises CanopyError for a damaged file.
    """
    on_disk = [_is_on_disk(chunk) for chunk, _ in parts]

    def rows(layer: int, of_disk: bool) -> list[tuple[torch.Tensor, torch.Tensor] | None]:
        return [
            chunk.rows(layer, tokens) if disk == of_disk else None
            for (chunk, tokens), disk in zip(parts, on_disk)
        ]

    if not any(on_disk):
        for layer in range(layers):
            yield [both for both in rows(layer, False) if both is not None]
        return

    def expect(layer: int) -> None:
        for (chunk, tokens), disk in zip(parts, on_disk):
            if disk and layer < layers:
                chunk.expect(layer, tokens)  # type: ignore[union-attr]

    for layer in range(1 + LAYERS_AHEAD):
        expect(layer)
    with ThreadPoolExecutor(1, thread_name_prefix="canopy-layers-ahead") as thread:
        pending = thread.submit(rows, 0, True)
        for layer in range(layers):
            read = pending.result()
            if layer + 1 < layers:
                pending = thread.submit(rows, layer + 1, True)
            expect(layer + 1 + LAYERS_AHEAD)
            both = (one or other for one, other in zip(read, rows(layer, False)))
            yield [one for one in both if one is not None]


def _is_on_disk(chunk: Stored) -> bool:
    return isinstance(base_and_skip(chunk)[0], DiskChunk)
