"""The queue of chunks to encode: bounded, and shared fairly between tenants.

Tenants take turns, so that one tenant's thousand documents do not delay another's. A full queue
drops chunks of the tenant with the longest queue. If that is the new chunk's tenant, the new chunk
is dropped.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import NamedTuple

MAX_WAITING_TOKENS = 1 << 20
MAX_WAITING_CHUNKS = 1 << 12
"""Bounds of the queue. Chunks beyond them are dropped until another prompt contains them."""


class QueuedChunk(NamedTuple):
    """A chunk to encode: tokens, prefix to encode it after, address salt, tenant."""

    ids: tuple[int, ...]
    prefix: tuple[int, ...]
    salt: str
    tenant: str | None


@dataclass(slots=True)
class _TenantQueue:
    """One tenant's chunks, oldest first, and their tokens."""

    chunks: OrderedDict[str, QueuedChunk]
    tokens: int = 0


class EncodeQueue:
    """Chunks by key. Every rank of a split model makes the same calls and gets the same results."""

    def __init__(self) -> None:
        self.by_tenant: OrderedDict[str | None, _TenantQueue] = OrderedDict()
        self.chunks = self.tokens = self.forgotten = 0

    def __len__(self) -> int:
        return self.chunks

    def add(self, key: str, chunk: QueuedChunk) -> None:
        """Append a chunk to its tenant's queue; a queued chunk keeps its position."""
        if (key, chunk.tenant) in self:
            return
        if not self._make_room(chunk):
            self.forgotten += 1
            return
        own = self.by_tenant.setdefault(chunk.tenant, _TenantQueue(OrderedDict()))
        own.chunks[key] = chunk
        self._count(own, 1, len(chunk.ids))

    def next(self) -> tuple[str, QueuedChunk] | None:
        """Remove and return the oldest chunk of the tenant whose turn it is."""
        if not self.by_tenant:
            return None
        tenant, queue = next(iter(self.by_tenant.items()))
        self.by_tenant.move_to_end(tenant)
        return self._take(tenant, next(iter(queue.chunks)))

    def remove(self, tenant: str | None) -> None:
        """Remove a tenant's queued chunks."""
        while tenant in self.by_tenant:
            self._take(tenant, next(iter(self.by_tenant[tenant].chunks)))

    def __contains__(self, key_and_tenant: tuple[str, str | None]) -> bool:
        """Return whether a tenant's chunk ``(key, tenant)`` is queued."""
        key, tenant = key_and_tenant
        return tenant in self.by_tenant and key in self.by_tenant[tenant].chunks

    def _make_room(self, chunk: QueuedChunk) -> bool:
        tokens = len(chunk.ids)
        if tokens > MAX_WAITING_TOKENS:
            return False
        while self.chunks >= MAX_WAITING_CHUNKS or self.tokens + tokens > MAX_WAITING_TOKENS:
            by_chunks = self.chunks >= MAX_WAITING_CHUNKS
            largest = max(self.by_tenant, key=lambda tenant: self._held(tenant, by_chunks))
            own = self._held(chunk.tenant, by_chunks) + (1 if by_chunks else tokens)
            if largest == chunk.tenant or self._held(largest, by_chunks) < own:
                return False
            self._take(largest, next(reversed(self.by_tenant[largest].chunks)))
            self.forgotten += 1
        return True

    def _held(self, tenant: str | None, by_chunks: bool) -> int:
        queue = self.by_tenant.get(tenant)
        if queue is None:
            return 0
        return len(queue.chunks) if by_chunks else queue.tokens

    def _take(self, tenant: str | None, key: str) -> tuple[str, QueuedChunk]:
        queue = self.by_tenant[tenant]
        chunk = queue.chunks.pop(key)
        self._count(queue, -1, -len(chunk.ids))
        if not queue.chunks:
            del self.by_tenant[tenant]
        return key, chunk

    def _count(self, queue: _TenantQueue, chunks: int, tokens: int) -> None:
        queue.tokens += tokens
        self.chunks += chunks
        self.tokens += tokens
