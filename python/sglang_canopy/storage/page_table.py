"""Metadata of pages between the tree and the storage backend, across threads.

The tree runs on the scheduler thread and works with nodes. HiCache's controller calls the storage
backend on other threads, with page keys only. One ``PageTable`` per process (``PAGES``) connects them:

- ``describe``, before a write, for ``description`` and ``parent`` on the storage threads
- ``mark_rewrite``, before a write, for ``take_rewrites``
- ``add_use``, after a hit, for ``take_uses``
- ``add_request``, when a request arrives or finishes, for ``take_requests``
- ``take_read``, when read pages enter the tree, of what the storage threads passed to ``add_read``
- ``take_refusal``, at intervals, of what they passed to ``add_refusal``

All parts are bounded: the oldest entries are dropped. A dropped entry makes metadata less accurate, but
never yields a wrong page.
"""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from sglang_canopy.disk.page import PageMeta
from sglang_canopy.records import Request

MAX_PAGES = 65_536
"""Maximum pages with pending metadata, in each direction; about 500 bytes each."""
_ABSENT = object()
MAX_EVENT_BYTES = 32 << 20
"""Maximum estimated memory of pending uses, and of pending requests, in bytes."""
_EVENT_BYTES, _BLOCK_BYTES, _KEY_BYTES = 512, 40, 128
"""Estimated bytes per event, per block of a path, and per page key."""


@dataclass(slots=True)
class _Description:
    meta: PageMeta
    parent: str | None


@dataclass(slots=True)
class _BoundedMap:
    """A mapping that drops its least recently written entries."""

    entries: OrderedDict[str, Any] = field(default_factory=OrderedDict)

    def put(self, key: str, value: Any, limit: int) -> None:
        """Insert or replace an entry."""
        self.entries[key] = value
        self.entries.move_to_end(key)
        if len(self.entries) > limit:
            self.entries.popitem(last=False)


class _EventQueue:
    """A queue that drops its oldest entries above ``max_bytes``."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._bytes = 0
        self._entries: deque[tuple[int, Any]] = deque()

    def put(self, size_bytes: int, entry: Any) -> None:
        """Append an entry, which is dropped too if it is larger than the limit."""
        self._entries.append((size_bytes, entry))
        self._bytes += size_bytes
        while self._bytes > self._max_bytes:
            dropped_bytes, _ = self._entries.popleft()
            self._bytes -= dropped_bytes

    def take(self) -> list[Any]:
        entries = [entry for _, entry in self._entries]
        self.clear()
        return entries

    def clear(self) -> None:
        self._entries.clear()
        self._bytes = 0


class PageTable:
    """Exchange between threads. Thread-safe; no call does I/O or runs a callback under the lock."""

    def __init__(self, max_pages: int = MAX_PAGES, max_event_bytes: int = MAX_EVENT_BYTES) -> None:
        self.max_pages = max_pages
        self._lock = threading.Lock()
        self._descriptions = _BoundedMap()
        self._reads = _BoundedMap()
        self._uses = _EventQueue(max_event_bytes)
        self._requests = _EventQueue(max_event_bytes)
        self._has_refusal = False
        self._rewrites = _BoundedMap()

    def describe(
        self, keys: Sequence[str], metas: Sequence[PageMeta], parents: Sequence[str | None]
    ) -> None:
        """Record metadata of pages about to be written. ``parents``: preceding keys, or ``None``."""
        with self._lock:
            for key, meta, parent in zip(keys, metas, parents, strict=True):
                self._descriptions.put(key, _Description(meta, parent), self.max_pages)

    def description(self, key: str) -> PageMeta | None:
        """Return a page's metadata from ``describe``; ``None`` if it is missing or was dropped."""
        with self._lock:
            described = self._descriptions.entries.get(key)
            return None if described is None else described.meta

    def parent(self, key: str, default: str | None = None) -> str | None:
        """Return the preceding page's key from ``describe`` (``None`` at a root), or ``default``."""
        with self._lock:
            described = self._descriptions.entries.get(key)
            return default if described is None else described.parent

    def drop_written(self, keys: Sequence[str]) -> None:
        """Drop the descriptions of pages that were stored."""
        with self._lock:
            for key in keys:
                self._descriptions.entries.pop(key, None)

    def mark_rewrite(self, keys: Sequence[str]) -> None:
        """Let the next write of these pages replace stored ones, to renew their lifetime."""
        with self._lock:
            for key in keys:
                self._rewrites.put(key, None, self.max_pages)

    def take_rewrites(self, keys: Sequence[str]) -> list[bool]:
        """Return for each page whether it was marked for rewriting, and clear the marks."""
        with self._lock:
            return [self._rewrites.entries.pop(key, _ABSENT) is not _ABSENT for key in keys]

    def add_refusal(self) -> None:
        """Record that offered pages are not stored, or no longer; see ``disk_retry``."""
        with self._lock:
            self._has_refusal = True

    def take_refusal(self) -> bool:
        """Return whether a refusal was recorded since the last call."""
        with self._lock:
            has_refusal, self._has_refusal = self._has_refusal, False
        return has_refusal

    def add_read(self, keys: Sequence[str], metas: Sequence[PageMeta]) -> None:
        """Record the metadata of pages read from storage."""
        with self._lock:
            for key, meta in zip(keys, metas, strict=True):
                self._reads.put(key, meta, self.max_pages)

    def take_read(self, keys: Sequence[str]) -> list[PageMeta | None]:
        """Return and forget the metadata read with these pages."""
        with self._lock:
            return [self._reads.entries.pop(key, None) for key in keys]

    def add_use(self, keys: Sequence[str], meta: PageMeta) -> None:
        """Record that a request used a run of pages, in any tier. ``keys``: a contiguous run,
        shallowest first, preferably from the start of the path. ``meta`` applies to all of them (last
        access, category, turn, ...)."""
        with self._lock:
            size_bytes = _EVENT_BYTES + _KEY_BYTES * len(keys)
            self._uses.put(size_bytes, (tuple(keys), meta))

    def take_uses(self) -> list[tuple[tuple[str, ...], PageMeta]]:
        """Return all uses since the last call, oldest first."""
        with self._lock:
            return self._uses.take()

    def add_request(self, event: str, request: Request) -> None:
        """Record a request for the disk tier's policy. ``event``: ``"arrive"`` or ``"finish"``. The
        request must not change afterwards."""
        with self._lock:
            size_bytes = _EVENT_BYTES + _BLOCK_BYTES * len(request.path)
            self._requests.put(size_bytes, (event, request))

    def take_requests(self) -> list[tuple[str, Request]]:
        """Return all entries of ``add_request`` since the last call, oldest first."""
        with self._lock:
            return self._requests.take()

    def clear(self) -> None:
        """Drop all entries, after a flush of the cache or between tests."""
        with self._lock:
            self._descriptions.entries.clear()
            self._reads.entries.clear()
            self._uses.clear()
            self._requests.clear()
            self._has_refusal = False
            self._rewrites.entries.clear()

    def __len__(self) -> int:
        with self._lock:
            return len(self._descriptions.entries) + len(self._reads.entries)


PAGES = PageTable()
