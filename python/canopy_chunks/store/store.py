"""The chunk store: content-addressed, in up to three bounded tiers, each with LRU eviction.

Chunks evicted from the device move to the host, those from the host to disk, and those from disk
are deleted. A chunk is in one tier at a time, and never enters the exact prefix tree.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from canopy_chunks.store import disk
from canopy_chunks.store.chunk import Chunk
from canopy_chunks.store.chunk_folder import ChunkFolder
from canopy_chunks.store.host_memory import HostChunk, HostMemory
from canopy_chunks.text.key import chunk_key, chunk_keys
from sglang_canopy.errors import CanopyError
from sglang_canopy.policy.base import Policy
from sglang_canopy.policy.registry import make_policy
from sglang_canopy.records import Leaf, Request

logger = logging.getLogger(__name__)

TIERS = ("device", "host", "disk")


StoredChunk = Chunk | HostChunk | disk.DiskChunk


class Entry(Leaf):
    """A stored chunk as an eviction policy sees it: a leaf without a parent."""

    __slots__ = ("chunk", "key", "pins", "size")

    def __init__(self, key: str, chunk: StoredChunk, size: int) -> None:
        super().__init__(0, max(1, len(chunk)))
        self.key, self.chunk, self.size, self.pins = key, chunk, size, 0


@dataclass(slots=True)
class Tier:
    """One tier: its bound in bytes, its policy, and its chunks by key."""

    name: str
    capacity_bytes: int
    policy: Policy
    entries: dict[str, Entry] = field(default_factory=dict)
    used_bytes: int = 0
    pinned_bytes: int = 0


class ChunkStore:
    """Chunks of one model. Thread-safe; times are the requests' own stamps, in seconds.

    capacity_bytes: by tier name; a tier without a capacity is off. ``directory`` is required for
    disk; it may hold files of the same model from an earlier run. ``keep``: see
    :class:`ChunkFolder`. memory: memory of the host tier's chunks; without it each chunk has its
    own tensor. Raises CanopyError for an unknown tier, or a directory that cannot be used.
    """

    def __init__(
        self,
        identity: str,
        capacity_bytes: Mapping[str, int],
        directory: str | Path | None = None,
        device: str = "cpu",
        keep: Callable[[list[str]], list[str]] | None = None,
        memory: HostMemory | None = None,
    ) -> None:
        unknown = set(capacity_bytes) - set(TIERS)
        if unknown or not capacity_bytes:
            raise CanopyError(
                f"chunk tiers {sorted(unknown) or 'are empty'}: allowed are {', '.join(TIERS)}, "
                f"with a capacity in bytes each"
            )
        if capacity_bytes.get("disk") and directory is None:
            raise CanopyError("a disk tier for chunks needs a directory; name one")
        self.identity, self.device = identity, device
        self.memory = memory
        self._lock = threading.RLock()
        self._tiers = [
            Tier(t, capacity_bytes[t], make_policy("lru")) for t in TIERS if capacity_bytes.get(t)
        ]
        self._documents: dict[str, set[str]] = {}
        self.pinned_removed: Callable[[str], None] = lambda key: None
        """Called with the key of a pinned chunk that is deleted."""
        self.hits = dict.fromkeys(TIERS, 0)
        self.misses = self.dropped = 0
        self.folder = None
        if directory is not None:
            self.folder = ChunkFolder(Path(directory) / identity[:16], keep)
            if self._tiers[-1:] and self._tiers[-1].name == "disk":
                for key, chunk in self.folder.found().items():
                    self._insert(len(self._tiers) - 1, key, chunk, 0.0)

    def key(self, ids: Sequence[int], prefix: Sequence[int] = (), salt: str = "") -> str:
        """Return the content address of these tokens after this prefix for this tenant."""
        return chunk_key(ids, self.identity, prefix, salt)

    def keys(
        self, ids: Sequence[int], prefixes: Sequence[Sequence[int]], salt: str = ""
    ) -> tuple[str, ...]:
        """Return :meth:`key` for each of several prefixes."""
        return chunk_keys(ids, self.identity, prefixes, salt)

    def put(self, chunk: Chunk, salt: str = "", now: float = 0.0) -> str:
        """Store a chunk in the first tier with room; storing it again counts as a use."""
        key = self.key(chunk.ids, chunk.prefix, salt)
        with self._lock:
            found = self._find(key)
            if found is None:
                self._insert(0, key, chunk, now)
            else:
                self._stamp(*found, now)
        return key

    def get(self, key: str, now: float = 0.0) -> StoredChunk | None:
        """Return the chunk of a key, or None. A chunk on disk stays there; its ``rows`` reads the
        file."""
        with self._lock:
            found = self._find(key)
            if found is None:
                self.misses += 1
                return None
            tier, entry = found
            self._stamp(tier, entry, now)
            self.hits[tier.name] += 1
            return entry.chunk

    def look(self, key: str) -> StoredChunk | None:
        """Return the chunk of a key, without counting it as a lookup or as a use for eviction."""
        with self._lock:
            found = self._find(key)
            return None if found is None else found[1].chunk

    def of_document(self, name: str) -> list[str]:
        """Return the keys of all stored chunks of a document, whatever their prefix."""
        with self._lock:
            return sorted(self._documents.get(name, ()))

    @property
    def capacity_bytes(self) -> int:
        """The capacity of all tiers together, in bytes."""
        return sum(tier.capacity_bytes for tier in self._tiers)

    def size(self, key: str) -> int:
        """Return the bytes of a stored chunk, 0 if it is not stored."""
        with self._lock:
            found = self._find(key)
            return 0 if found is None else found[1].size

    def pins(self, key: str) -> int:
        """Return the number of pins of a stored chunk, 0 if it is not stored."""
        with self._lock:
            found = self._find(key)
            return 0 if found is None else found[1].pins

    def where(self, key: str) -> str | None:
        """Return the name of the tier that holds a key."""
        with self._lock:
            found = self._find(key)
            return None if found is None else found[0].name

    def pin(self, key: str) -> bool:
        """Keep a chunk in its tier until every ``pin`` is undone. Returns whether it is stored."""
        return self._pin(key, 1)

    def unpin(self, key: str) -> bool:
        """Undo one ``pin``."""
        return self._pin(key, -1)

    def delete(self, key: str) -> bool:
        """Delete a chunk from any tier. Returns False if it was not stored."""
        with self._lock:
            found = self._find(key)
            if found is not None:
                self._remove(*found)
            return found is not None

    def delete_files(self) -> None:
        """Delete the chunks on disk and their folder, as the store is closed."""
        with self._lock:
            for tier in self._tiers:
                for entry in list(tier.entries.values()) if tier.name == "disk" else ():
                    self._remove(tier, entry)
        if self.folder is not None:
            self.folder.remove()

    def delete_damaged(self, keys: Iterable[str]) -> None:
        """Delete those chunks on disk whose files cannot be read."""
        for key in keys:
            chunk = self.look(key)
            if not isinstance(chunk, disk.DiskChunk):
                continue
            try:
                chunk.load()
            except (CanopyError, OSError) as error:
                logger.warning("canopy: %s", error)
                self.delete(key)

    def listing(self) -> list[tuple[str, str, int, int]]:
        """Return ``(key, tier, tokens, pins)`` of every stored chunk."""
        with self._lock:
            return [
                (key, tier.name, len(entry.chunk), entry.pins)
                for tier in self._tiers
                for key, entry in tier.entries.items()
            ]

    def __len__(self) -> int:
        with self._lock:
            return sum(len(t.entries) for t in self._tiers)

    def stats(self) -> dict[str, Any]:
        """Return the counters, and chunks and bytes by tier."""
        with self._lock:
            tiers = {
                t.name: {
                    "chunks": len(t.entries),
                    "used_bytes": t.used_bytes,
                    "capacity_bytes": t.capacity_bytes,
                }
                for t in self._tiers
            }
            return {
                "hits": dict(self.hits),
                "misses": self.misses,
                "dropped": self.dropped,
                "tiers": tiers,
            }

    def check(self) -> None:
        """Recount everything. Raises AssertionError if a count is wrong."""
        seen: set[str] = set()
        for tier in self._tiers:
            total = sum(e.size for e in tier.entries.values())
            assert total == tier.used_bytes, (
                f"{tier.name}: {total} bytes, counted {tier.used_bytes}"
            )
            assert total <= tier.capacity_bytes, f"{tier.name}: {total} > {tier.capacity_bytes}"
            assert not seen & set(tier.entries), "a chunk is in two tiers"
            seen |= set(tier.entries)
            pinned = sum(e.size for e in tier.entries.values() if e.pins)
            assert pinned == tier.pinned_bytes, (
                f"{tier.name}: {pinned} pinned bytes, counted {tier.pinned_bytes}"
            )
            free = sum(e.pins == 0 for e in tier.entries.values())
            admitted = sum(1 for _ in tier.policy.leaves())
            assert admitted == free, f"{tier.name}: {admitted} evictable, {free} without pins"
        named = {key for keys in self._documents.values() for key in keys}
        assert named == seen, f"{len(named)} chunks of documents, {len(seen)} stored"

    def _find(self, key: str) -> tuple[Tier, Entry] | None:
        return next(((t, t.entries[key]) for t in self._tiers if key in t.entries), None)

    def _stamp(self, tier: Tier, entry: Entry, now: float) -> None:
        tier.policy.drop(entry)
        request = Request(time=now, category="chunk", prompt_tokens=entry.length)
        request.label = tier.policy.arrive(request)
        request.label = tier.policy.finish(request)
        entry.stamp(request)
        if not entry.pins:
            tier.policy.admit(entry, now)

    def _insert(self, first: int, key: str, chunk: StoredChunk, now: float) -> None:
        """Insert a chunk into the first tier from ``first`` on that can make room for it."""
        for index in range(first, len(self._tiers)):
            tier = self._tiers[index]
            size = self._size(tier, chunk)
            if size > tier.capacity_bytes - tier.pinned_bytes:
                continue
            while tier.used_bytes + size > tier.capacity_bytes:
                self._evict(index, now)
            converted = self._in_form_of(tier, key, chunk)
            if converted is None:
                break
            entry = Entry(key, converted, size)
            tier.entries[key] = entry
            tier.used_bytes += size
            self._documents.setdefault(chunk.document, set()).add(key)
            self._stamp(tier, entry, now)
            return
        self.dropped += 1

    def _evict(self, index: int, now: float) -> None:
        tier = self._tiers[index]
        victim = tier.policy.victim(now)
        assert victim is not None, f"{tier.name} is full and has no victim"
        entry = victim.leaf
        assert isinstance(entry, Entry)
        chunk = entry.chunk
        self._remove(tier, entry)
        tier.policy.evicted(entry, entry.length)
        if index + 1 < len(self._tiers):
            self._insert(index + 1, entry.key, chunk, entry.last_access)
        else:
            self.dropped += 1

    def _remove(self, tier: Tier, entry: Entry) -> None:
        tier.policy.drop(entry)
        del tier.entries[entry.key]
        tier.used_bytes -= entry.size
        if entry.pins:
            tier.pinned_bytes -= entry.size
            self.pinned_removed(entry.key)
        of_document = self._documents[entry.chunk.document]
        of_document.discard(entry.key)
        if not of_document:
            del self._documents[entry.chunk.document]
        if isinstance(entry.chunk, disk.DiskChunk) and self.folder is not None:
            self.folder.delete(entry.chunk)

    def _size(self, tier: Tier, chunk: StoredChunk) -> int:
        return chunk.nbytes if tier.name != "disk" else disk.file_size(chunk)

    def _in_form_of(self, tier: Tier, key: str, chunk: StoredChunk) -> StoredChunk | None:
        """Return the chunk in this tier's form; ``None`` if it cannot be written."""
        if isinstance(chunk, disk.DiskChunk):
            return chunk
        if tier.name == "disk":
            assert self.folder is not None
            written = self.folder.write(key, chunk)
            if self.folder.full:
                tier.capacity_bytes = tier.used_bytes  # from now on, files are evicted to make room
            return written
        if tier.name == "host" and self.memory is not None:
            held = self.memory.hold(chunk)
            if held is not None:
                return held
        place = self.device if tier.name == "device" else "cpu"
        return Chunk(
            chunk.ids, chunk.raw_k.to(place), chunk.v.to(place), chunk.prefix, chunk.scores,
            chunk.document,
        )  # fmt: skip

    def _pin(self, key: str, step: int) -> bool:
        with self._lock:
            found = self._find(key)
            if found is None:
                return False
            tier, entry = found
            if entry.pins + step < 0:
                raise CanopyError(f"chunk {key[:12]} is not pinned; call unpin once per pin")
            tier.pinned_bytes -= entry.size if entry.pins else 0
            entry.pins += step
            tier.pinned_bytes += entry.size if entry.pins else 0
            tier.policy.drop(entry)
            if entry.pins == 0:
                tier.policy.admit(entry, entry.last_access)
            return True
