"""Chunks in the product's disk store, under a namespace of their own.

A chunk is a run of pages, ``[layers, PAGE_TOKENS, 2, kv_heads, d]`` each, K before RoPE
and then V, the last page padded. Each page hangs below the one before it, so a chunk is complete if
its last page is there. A page's key follows from the chunk's address: whoever knows the tokens finds
the chunk, and nothing else is stored. One thread writes, and reads ahead while requests wait.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from canopy_documents import READ_AHEAD_BYTES
from canopy_documents.store.chunk import Chunk, Shape
from canopy_documents.store.host_memory import HostChunk
from sglang_canopy.disk.page import PageMeta
from sglang_canopy.disk.store import DiskStore
from sglang_canopy.policy.registry import make_policy

logger = logging.getLogger(__name__)

PAGE_TOKENS = 16
MAX_WAITING_CHUNKS = 8
"""Chunks that wait to be written; more are not written. They hold memory."""

ReadFuture = Future["tuple[torch.Tensor, torch.Tensor] | None"]


class ChunkDisk:
    """Chunks of one model on disk. Every method is for the scheduler's thread.

    Raises CanopyError for a folder that cannot be used. Other faults lose chunks, and are logged once.
    """

    def __init__(
        self,
        folder: str | Path,
        capacity_bytes: int,
        shape: Shape,
        dtype: torch.dtype,
        identity: str,
    ) -> None:
        self.page_dims = (shape.layers, PAGE_TOKENS, 2, shape.kv_heads, shape.head_dim)
        self.dtype = dtype
        self.page_bytes = torch.Size(self.page_dims).numel() * dtype.itemsize
        self.store = DiskStore(
            folder,
            page_bytes=self.page_bytes,
            capacity_bytes=max(capacity_bytes, self.page_bytes),
            policy=make_policy("lru"),
            namespace=f"documents|{identity}",
        )
        self.written_chunks = self.skipped_chunks = 0
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="canopy-documents-disk")
        self._writes: dict[str, Future[None]] = {}
        self._reads: dict[str, ReadFuture] = {}

    def holds(self, key: str, tokens: int) -> bool:
        """Return whether a chunk of this many tokens is on disk."""
        return self.store.meta(_page_keys(key, tokens)[-1:])[0] is not None

    def write(self, key: str, chunk: Chunk | HostChunk) -> None:
        """Start to write a chunk, unless it is there, or too many wait."""
        self._writes = {k: future for k, future in self._writes.items() if not future.done()}
        if key in self._writes or self.holds(key, len(chunk)):
            return
        if len(self._writes) >= MAX_WAITING_CHUNKS:
            self.skipped_chunks += 1
            return
        self._writes[key] = self._thread.submit(self._write, key, chunk)

    def read_ahead(self, key: str, tokens: int) -> None:
        """Start to read a chunk that a waiting request will use."""
        self._reads = {k: future for k, future in self._reads.items() if not future.cancelled()}
        reserved_bytes = (len(self._reads) + 1) * -(-tokens // PAGE_TOKENS) * self.page_bytes
        if key not in self._reads and reserved_bytes <= READ_AHEAD_BYTES:
            self._reads[key] = self._thread.submit(self._read, key, tokens)

    def read(self, key: str, ids: Sequence[int], prefix: Sequence[int]) -> Chunk | None:
        """Return a chunk in host memory; ``None`` if it is not on disk, or damaged."""
        ahead = self._reads.pop(key, None)
        rows = self._read(key, len(ids)) if ahead is None or ahead.cancel() else ahead.result()
        return None if rows is None else Chunk(tuple(ids), *rows, tuple(prefix))

    def drop_reads(self) -> None:
        """Drop what was read ahead."""
        for future in self._reads.values():
            future.cancel()
        self._reads.clear()

    def delete_tenant(self, tenant: str | None) -> int:
        """Delete a tenant's chunks, after those that are being written. Returns the pages."""
        self.drop_reads()
        return self._thread.submit(self.store.remove_tenant, tenant).result()

    def finish(self) -> None:
        """Wait until everything is written."""
        self._thread.submit(lambda: None).result()

    def discard(self) -> None:
        """Delete every chunk, as the store is closed."""
        self._thread.shutdown(cancel_futures=True)
        self.store.discard()

    def stats(self) -> dict[str, Any]:
        """Return the bytes on disk, and the chunks written and left out since the start."""
        return {
            "chunks": self.written_chunks,
            "used_bytes": len(self.store) * self.page_bytes,
            "capacity_bytes": self.store.capacity_bytes,
            "not_written": self.skipped_chunks,
        }

    def _write(self, key: str, chunk: Chunk | HostChunk) -> None:
        try:
            if not self.store.open():  # tried again at every write
                return
            keys, layers = _page_keys(key, len(chunk)), self.page_dims[0]
            kv = torch.zeros(layers, len(keys) * PAGE_TOKENS, *self.page_dims[2:], dtype=self.dtype)
            for part, rows in enumerate((chunk.raw_k, chunk.v)):
                kv[:, : len(chunk), part] = rows.cpu()
            pages = [
                kv[:, start : start + PAGE_TOKENS].contiguous().view(torch.uint8).numpy().data
                for start in range(0, kv.shape[1], PAGE_TOKENS)
            ]
            # Pages of one document have one time of use, so they leave together.
            now = self.store.clock()
            metas = [
                PageMeta(
                    number * PAGE_TOKENS,
                    PAGE_TOKENS,
                    category="document",
                    tenant=chunk.tenant,
                    created=now,
                    last_access=now,
                )
                for number in range(len(keys))
            ]
            stored = self.store.write(keys, pages, metas, [None, *keys[:-1]])
            self.written_chunks += all(stored)
            self.store.sweep()
        except Exception:
            logger.exception("canopy: a document could not be written to disk")

    def _read(self, key: str, tokens: int) -> tuple[torch.Tensor, torch.Tensor] | None:
        keys = _page_keys(key, tokens)
        pages = torch.empty(len(keys), *self.page_dims, dtype=self.dtype)
        buffers = [page.view(torch.uint8).numpy().data for page in pages]
        if not all(self.store.read(keys, buffers)):
            return None
        token_pairs = pages.transpose(0, 1).flatten(1, 2)[:, :tokens]
        return token_pairs[:, :, 0].contiguous(), token_pairs[:, :, 1].contiguous()


def _page_keys(key: str, tokens: int) -> list[str]:
    """Return the keys of a chunk's pages; ``key``: 64 hex digits."""
    return [f"{key[:56]}{number:08x}" for number in range(-(-tokens // PAGE_TOKENS))]
