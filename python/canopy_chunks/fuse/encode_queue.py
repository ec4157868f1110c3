"""The queue of chunks to encode: bounded, and shared fairly between tenants.

Tenants take turns, so that one tenant's thousand documents do not delay another's.
"""

from __future__ import annotations

from typing import NamedTuple

from sglang_canopy.bounded import BoundedByTenant, Entry

MAX_WAITING_TOKENS = 1 << 20
"""Bound of the queue. Chunks that leave a full queue wait until another prompt contains them."""
MIN_TOKENS = 256
"""Tokens that a shorter chunk counts as, so that the number of chunks is bounded too."""


class QueuedChunk(NamedTuple):
    """A chunk to encode: tokens, prefix to encode it after, address salt, tenant."""

    ids: tuple[int, ...]
    prefix: tuple[int, ...]
    salt: str
    tenant: str | None


class EncodeQueue:
    """Chunks by key. Every rank of a split model makes the same calls and gets the same results."""

    def __init__(self) -> None:
        self.waiting: BoundedByTenant[str, QueuedChunk] = BoundedByTenant(MAX_WAITING_TOKENS)
        self.tokens = self.forgotten = 0

    def __len__(self) -> int:
        return len(self.waiting)

    def add(self, key: str, chunk: QueuedChunk) -> None:
        """Append a chunk to its tenant's queue; a queued chunk keeps its position."""
        if self.waiting.get(chunk.tenant, key) is not None:
            return
        self.tokens += len(chunk.ids)
        size = max(MIN_TOKENS, len(chunk.ids))
        for gone in self.waiting.put(chunk.tenant, key, chunk, size):
            self.tokens -= len(gone.value.ids)
            self.forgotten += 1

    def next(self) -> Entry[str, QueuedChunk] | None:
        """Remove and return the oldest chunk of the tenant whose turn it is."""
        entry = self.waiting.next()
        self.tokens -= len(entry.value.ids) if entry is not None else 0
        return entry

    def remove(self, tenant: str | None) -> bool:
        """Remove a tenant's queued chunks. Return whether there were any."""
        found = self.waiting.forget(tenant)
        self.tokens = sum(len(entry.value.ids) for entry in self.waiting)
        return found
