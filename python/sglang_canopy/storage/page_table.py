"""Metadata of pages between the tree and the storage backend, across threads.

The tree core lives on the scheduler thread and knows nodes; HiCache's controller calls the
storage backend on its own threads and knows page keys only. One ``PageTable`` a process
(``PAGES``) lies between them:

scheduler thread                                 storage threads
``describe(keys, metas, parents)``  before a write  ->  ``description(key)``, ``parent(key)``
``add_use(keys, meta)``             a request hit   ->  ``take_uses()``
``add_request(event, request)``     arrive, finish  ->  ``take_requests()``
``take_read(keys)``                 on insertion    <-  ``add_read(keys, metas)``
``take_refusal()``                  now and then    <-  ``add_refusal()``
``mark_rewrite(keys)``              before a write  ->  ``take_rewrites(keys)``

Everything is bounded: the oldest entries are dropped, and counted. A dropped entry costs
accuracy of metadata, never a wrong page.
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
"""Pages whose metadata waits to be written or to be restored, each way. About 500 bytes each."""
_ABSENT = object()
MAX_EVENT_BYTES = 32 << 20
"""Uses that wait for a storage thread, and requests likewise: an estimate of their memory."""
_EVENT_BYTES, _BLOCK_BYTES, _KEY_BYTES = 512, 40, 128
"""Of an event by itself, and of each block of a request's path or key of a used page."""


@dataclass(slots=True)
class Dropped:
    """How many entries were dropped because nobody took them in time."""

    descriptions: int = 0
    reads: int = 0
    uses: int = 0
    requests: int = 0


@dataclass(slots=True)
class _Description:
    meta: PageMeta
    parent: str | None


@dataclass(slots=True)
class _Bounded:
    """A mapping that drops its least recently written entries."""

    entries: OrderedDict[str, Any] = field(default_factory=OrderedDict)

    def put(self, key: str, value: Any, limit: int) -> int:
        """Returns how many entries were dropped for it (0 or 1)."""
        self.entries[key] = value
        self.entries.move_to_end(key)
        if len(self.entries) <= limit:
            return 0
        self.entries.popitem(last=False)
        return 1


class _Events:
    """A queue that drops its oldest entries where they need more memory than ``limit`` bytes."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._bytes = 0
        self._entries: deque[tuple[int, Any]] = deque()

    def put(self, size: int, entry: Any) -> int:
        """Returns how many entries were dropped for it; itself, where it alone is too large."""
        self._entries.append((size, entry))
        self._bytes += size
        dropped = 0
        while self._bytes > self._limit:
            self._bytes -= self._entries.popleft()[0]
            dropped += 1
        return dropped

    def take(self) -> list[Any]:
        taken = [entry for _, entry in self._entries]
        self.clear()
        return taken

    def clear(self) -> None:
        self._entries.clear()
        self._bytes = 0


class PageTable:
    """Thread-safe. Every call is short: no I/O and no callback under the lock."""

    def __init__(self, max_pages: int = MAX_PAGES, max_event_bytes: int = MAX_EVENT_BYTES) -> None:
        self.max_pages = max_pages
        self.dropped = Dropped()
        self._lock = threading.Lock()
        self._descriptions = _Bounded()
        self._reads = _Bounded()
        self._uses = _Events(max_event_bytes)
        self._requests = _Events(max_event_bytes)
        self._refused = False
        self._rewrites = _Bounded()

    def describe(
        self,
        keys: Sequence[str],
        metas: Sequence[PageMeta],
        parents: Sequence[str | None],
    ) -> None:
        """These pages are about to be written. ``parents``: the page before, or ``None``."""
        with self._lock:
            for key, meta, parent in zip(keys, metas, parents, strict=True):
                self.dropped.descriptions += self._descriptions.put(
                    key, _Description(meta, parent), self.max_pages
                )

    def description(self, key: str) -> PageMeta | None:
        """A page's metadata as the tree gave it; ``None`` if it did not, or long ago."""
        with self._lock:
            found = self._descriptions.entries.get(key)
            return None if found is None else found.meta

    def parent(self, key: str, default: str | None = None) -> str | None:
        """The key of the page before, as the tree gave it (``None`` at a root)."""
        with self._lock:
            found = self._descriptions.entries.get(key)
            return default if found is None else found.parent

    def written(self, keys: Sequence[str]) -> None:
        """These pages are stored: their descriptions are no longer needed."""
        with self._lock:
            for key in keys:
                self._descriptions.entries.pop(key, None)

    def mark_rewrite(self, keys: Sequence[str]) -> None:
        """The next write of these pages replaces what the storage has, to renew its time."""
        with self._lock:
            for key in keys:
                self._rewrites.put(key, None, self.max_pages)

    def take_rewrites(self, keys: Sequence[str]) -> list[bool]:
        """Which of these pages to write though the storage has them, once."""
        with self._lock:
            return [self._rewrites.entries.pop(key, _ABSENT) is not _ABSENT for key in keys]

    def add_refusal(self) -> None:
        """Pages that were offered are not stored, or no longer: see ``disk_retry``."""
        with self._lock:
            self._refused = True

    def take_refusal(self) -> bool:
        """Whether anything was refused since the last call."""
        with self._lock:
            refused, self._refused = self._refused, False
        return refused

    def add_read(self, keys: Sequence[str], metas: Sequence[PageMeta]) -> None:
        """These pages were read from storage, with this metadata."""
        with self._lock:
            for key, meta in zip(keys, metas, strict=True):
                self.dropped.reads += self._reads.put(key, meta, self.max_pages)

    def take_read(self, keys: Sequence[str]) -> list[PageMeta | None]:
        """The metadata read with these pages, once: a second call gives ``None``."""
        with self._lock:
            return [self._reads.entries.pop(key, None) for key in keys]

    def add_use(self, keys: Sequence[str], meta: PageMeta) -> None:
        """A request used this run of pages, in whichever tier it found them.

        ``keys`` are a contiguous run, shallowest first, best from the start of the path;
        ``meta`` is the request's view (last access, category, turn, ...) for all of them.
        """
        with self._lock:
            size = _EVENT_BYTES + _KEY_BYTES * len(keys)
            self.dropped.uses += self._uses.put(size, (tuple(keys), meta))

    def take_uses(self) -> list[tuple[tuple[str, ...], PageMeta]]:
        """All uses since the last call, oldest first."""
        with self._lock:
            return self._uses.take()

    def add_request(self, event: str, request: Request) -> None:
        """A request ``"arrive"``\\ d or ``"finish"``\\ ed: the disk tier's policy learns from it.

        The object must not change afterwards.
        """
        with self._lock:
            size = _EVENT_BYTES + _BLOCK_BYTES * len(request.path)
            self.dropped.requests += self._requests.put(size, (event, request))

    def take_requests(self) -> list[tuple[str, Request]]:
        """All of ``add_request`` since the last call, oldest first."""
        with self._lock:
            return self._requests.take()

    def clear(self) -> None:
        """Drop everything (the cache was flushed, or another test begins)."""
        with self._lock:
            self._descriptions.entries.clear()
            self._reads.entries.clear()
            self._uses.clear()
            self._requests.clear()
            self._refused = False
            self._rewrites.entries.clear()
            self.dropped = Dropped()

    def __len__(self) -> int:
        with self._lock:
            return len(self._descriptions.entries) + len(self._reads.entries)


PAGES = PageTable()
"""The one table of this process."""
