"""The chunk store: content-addressed, in host memory and below it on disk, each bounded with LRU.

A chunk is written to disk when it is stored, so its eviction from memory costs nothing, and a
restarted server finds it. A chunk that is read from disk is in memory again. No chunk enters the
exact prefix tree.
"""

from __future__ import annotations

import hashlib
import struct
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

from canopy_documents.store.chunk import Chunk
from canopy_documents.store.disk import ChunkDisk
from canopy_documents.store.host_memory import HostChunk, HostMemory

TIERS = ("host", "disk")


class ChunkStore:
    """Chunks of one model. Ranks that make the same calls hold the same chunks in memory.

    memory: allocation of the chunks in memory; without it each chunk has its own tensor.
    """

    def __init__(
        self,
        identity: str,
        capacity_bytes: int,
        memory: HostMemory | None = None,
        disk: ChunkDisk | None = None,
    ) -> None:
        self.identity, self.capacity_bytes = identity, capacity_bytes
        self.memory, self.disk = memory, disk
        self.chunks: OrderedDict[str, Chunk | HostChunk] = OrderedDict()
        """Chunks in memory, least recently used first."""
        self.used_bytes = 0
        self.hits = dict.fromkeys(TIERS, 0)
        self.misses = self.dropped = 0

    def key(self, ids: Sequence[int], prefix: Sequence[int] = (), salt: str = "") -> str:
        """Return the content address of a chunk: a digest of its tokens, the model, the prefix and the
        tenant's salt.

        Two tenants with different salts share nothing, not even the knowledge that a chunk exists.
        """
        return self.keys(ids, (prefix,), salt)[0]

    def keys(
        self, ids: Sequence[int], prefixes: Sequence[Sequence[int]], salt: str = ""
    ) -> tuple[str, ...]:
        """Return :meth:`key` for each of several prefixes."""
        base_digest = hashlib.sha256()
        for part in (self.identity, salt):
            raw = part.encode()
            base_digest.update(len(raw).to_bytes(8, "little") + raw)
        tokens, addresses = _token_bytes(ids), []
        for prefix in prefixes:
            digest = base_digest.copy()
            digest.update(_token_bytes(prefix))
            digest.update(tokens)
            addresses.append(digest.hexdigest())
        return tuple(addresses)

    def put(self, chunk: Chunk, salt: str = "") -> str:
        """Store a chunk; storing it again counts as a use."""
        key = self.key(chunk.ids, chunk.prefix, salt)
        if key in self.chunks:
            self.chunks.move_to_end(key)
            return key
        host_chunk = self._insert(key, chunk)
        if self.disk is not None:
            self.disk.write(key, host_chunk or chunk)
        elif host_chunk is None:
            self.dropped += 1
        return key

    def tier_of(self, key: str, tokens: int) -> str | None:
        """Return the tier that holds a chunk of this many tokens."""
        if key in self.chunks:
            return "host"
        return "disk" if self.disk is not None and self.disk.holds(key, tokens) else None

    def get(
        self, key: str, ids: Sequence[int], prefix: Sequence[int], tenant: str | None = None
    ) -> Chunk | HostChunk | None:
        """Return a chunk of these tokens after this prefix, and count it as used; or ``None``."""
        chunk: Chunk | HostChunk | None = self.chunks.get(key)
        if chunk is not None:
            self.chunks.move_to_end(key)
            self.hits["host"] += 1
            return chunk
        disk_chunk = self.disk.read(key, ids, prefix) if self.disk is not None else None
        if disk_chunk is None:
            self.misses += 1
            return None
        self.hits["disk"] += 1
        disk_chunk.tenant = tenant
        return self._insert(key, disk_chunk) or disk_chunk

    def delete(self, key: str) -> bool:
        """Delete a chunk from memory. Returns whether it was there."""
        chunk = self.chunks.pop(key, None)
        if chunk is not None:
            self.used_bytes -= chunk.nbytes
        return chunk is not None

    def delete_tenant(self, tenant: str | None) -> bool:
        """Delete all chunks of a tenant. Returns whether it had any."""
        keys = [key for key, chunk in self.chunks.items() if chunk.tenant == tenant]
        for key in keys:
            self.delete(key)
        pages = self.disk.delete_tenant(tenant) if self.disk is not None else 0
        return bool(keys or pages)

    def discard(self) -> None:
        """Delete the chunks on disk, as the store is closed."""
        if self.disk is not None:
            self.disk.discard()

    def __len__(self) -> int:
        return len(self.chunks)

    def stats(self) -> dict[str, Any]:
        """Return the counters, and chunks and bytes by tier. Safe on any thread."""
        tiers = {
            "host": {
                "chunks": len(self.chunks),
                "used_bytes": self.used_bytes,
                "capacity_bytes": self.capacity_bytes,
            }
        }
        if self.disk is not None:
            tiers["disk"] = self.disk.stats()
        counts = {"hits": dict(self.hits), "misses": self.misses, "dropped": self.dropped}
        return {**counts, "tiers": tiers}

    def check(self) -> None:
        """Recount everything. Raises AssertionError if a count is wrong."""
        total = sum(chunk.nbytes for chunk in self.chunks.values())
        assert total == self.used_bytes, f"{total} bytes, counted {self.used_bytes}"
        assert total <= self.capacity_bytes, f"{total} > {self.capacity_bytes}"

    def _insert(self, key: str, chunk: Chunk) -> Chunk | HostChunk | None:
        """Put a chunk into memory, in memory's form; ``None`` if it has no room there."""
        if chunk.nbytes > self.capacity_bytes:
            return None
        while self.used_bytes + chunk.nbytes > self.capacity_bytes:
            self.used_bytes -= self.chunks.popitem(last=False)[1].nbytes
            self.dropped += self.disk is None
        host_chunk = self.memory.copy_in(chunk) if self.memory is not None else None
        self.chunks[key] = host_chunk or chunk.on_host()
        self.used_bytes += chunk.nbytes
        return self.chunks[key]


def _token_bytes(tokens: Sequence[int]) -> bytes:
    """Return the number of tokens and each token, 8 bytes little-endian."""
    return len(tokens).to_bytes(8, "little") + struct.pack(f"<{len(tokens)}q", *tokens)
