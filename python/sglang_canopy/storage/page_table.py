"""What the tree and the storage backend tell each other of pages, across threads.

The tree core lives on the scheduler thread and knows nodes; HiCache's controller calls the
storage backend on its own threads and knows page keys only. One ``PageTable`` a process
(``PAGES``) lies between them:

scheduler thread                                 storage threads
``note(keys, metas, parents)``   before a backup ->  ``of(key)``, ``parent(key)``
``used(keys, meta)``             a request hit   ->  ``uses()``
``announce(event, request)``     arrive, finish  ->  ``announced()``
``take(keys)``                   on insertion    <-  ``returned(keys, metas)``
``refusals()``                   now and then    <-  ``refused()``
``renew(keys)``                  before a write  ->  ``renewals(keys)``

Everything is bounded: the oldest entries are forgotten, and counted. Forgetting costs
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
"""Pages whose metadata waits to be written or to be taken, each way. About 500 bytes each."""
_ABSENT = object()
MAX_EVENTS = 16_384
"""Uses and announcements that wait for a storage thread."""


@dataclass(slots=True)
class Forgotten:
    """How often something was dropped because nobody came for it."""

    noted: int = 0
    returned: int = 0
    uses: int = 0
    announced: int = 0


@dataclass(slots=True)
class _Noted:
    meta: PageMeta
    parent: str | None


@dataclass(slots=True)
class _Half:
    """A mapping that forgets its least recently written entries."""

    entries: OrderedDict[str, Any] = field(default_factory=OrderedDict)

    def put(self, key: str, value: Any, limit: int) -> int:
        """Returns how many entries were forgotten for it (0 or 1)."""
        self.entries[key] = value
        self.entries.move_to_end(key)
        if len(self.entries) <= limit:
            return 0
        self.entries.popitem(last=False)
        return 1


class PageTable:
    """Thread-safe. Every call is short: no I/O and no callback under the lock."""

    def __init__(self, max_pages: int = MAX_PAGES, max_events: int = MAX_EVENTS) -> None:
        self.max_pages = max_pages
        self.max_events = max_events
        self.forgotten = Forgotten()
        self._lock = threading.Lock()
        self._noted = _Half()
        self._returned = _Half()
        self._uses: deque[tuple[tuple[str, ...], PageMeta]] = deque()
        self._announced: deque[tuple[str, Request]] = deque()
        self._refused = False
        self._renewed = _Half()

    def note(
        self,
        keys: Sequence[str],
        metas: Sequence[PageMeta],
        parents: Sequence[str | None],
    ) -> None:
        """The tree is about to back these pages up. ``parents``: the page before, or ``None``."""
        with self._lock:
            for key, meta, parent in zip(keys, metas, parents, strict=True):
                self.forgotten.noted += self._noted.put(key, _Noted(meta, parent), self.max_pages)

    def of(self, key: str) -> PageMeta | None:
        """What the tree noted of a page; ``None`` if it did not, or long ago."""
        with self._lock:
            found = self._noted.entries.get(key)
            return None if found is None else found.meta

    def parent(self, key: str, default: str | None = None) -> str | None:
        """The key of the page before, as the tree noted it (``None`` at a root)."""
        with self._lock:
            found = self._noted.entries.get(key)
            return default if found is None else found.parent

    def written(self, keys: Sequence[str]) -> None:
        """These pages are stored: what was noted of them is no longer needed."""
        with self._lock:
            for key in keys:
                self._noted.entries.pop(key, None)

    def renew(self, keys: Sequence[str]) -> None:
        """The next write of these pages is one more write of what the storage has."""
        with self._lock:
            for key in keys:
                self._renewed.put(key, None, self.max_pages)

    def renewals(self, keys: Sequence[str]) -> list[bool]:
        """Which of these pages are to be written though the storage has them; said once."""
        with self._lock:
            return [self._renewed.entries.pop(key, _ABSENT) is not _ABSENT for key in keys]

    def refused(self) -> None:
        """Pages that were offered are not stored, or no longer: see ``disk_retry``."""
        with self._lock:
            self._refused = True

    def refusals(self) -> bool:
        """Whether anything was refused since the last call."""
        with self._lock:
            refused, self._refused = self._refused, False
        return refused

    def returned(self, keys: Sequence[str], metas: Sequence[PageMeta]) -> None:
        """These pages were read from storage; the tree may ``take`` what was stored of them."""
        with self._lock:
            for key, meta in zip(keys, metas, strict=True):
                self.forgotten.returned += self._returned.put(key, meta, self.max_pages)

    def take(self, keys: Sequence[str]) -> list[PageMeta | None]:
        """What came back with these pages, once: a second ``take`` gives ``None``."""
        with self._lock:
            return [self._returned.entries.pop(key, None) for key in keys]

    def used(self, keys: Sequence[str], meta: PageMeta) -> None:
        """A request used this run of pages, wherever it found them: the disk tier should know.

        ``keys`` are a contiguous run, shallowest first, best from the start of the path;
        ``meta`` is the request's view (last access, category, turn, ...) for all of them.
        """
        with self._lock:
            if len(self._uses) >= self.max_events:
                self._uses.popleft()
                self.forgotten.uses += 1
            self._uses.append((tuple(keys), meta))

    def uses(self) -> list[tuple[tuple[str, ...], PageMeta]]:
        """All uses since the last call, oldest first."""
        return self._drain(self._uses)

    def announce(self, event: str, request: Request) -> None:
        """A request ``"arrive"``\\ d or ``"finish"``\\ ed: the disk tier's policy learns from it.

        The object must not change afterwards.
        """
        with self._lock:
            if len(self._announced) >= self.max_events:
                self._announced.popleft()
                self.forgotten.announced += 1
            self._announced.append((event, request))

    def announced(self) -> list[tuple[str, Request]]:
        """All announcements since the last call, oldest first."""
        return self._drain(self._announced)

    def clear(self) -> None:
        """Forget everything (the cache was flushed, or another test begins)."""
        with self._lock:
            self._noted.entries.clear()
            self._returned.entries.clear()
            self._uses.clear()
            self._announced.clear()
            self._refused = False
            self._renewed.entries.clear()
            self.forgotten = Forgotten()

    def __len__(self) -> int:
        with self._lock:
            return len(self._noted.entries) + len(self._returned.entries)

    def _drain(self, queue: deque[Any]) -> list[Any]:
        with self._lock:
            taken = list(queue)
            queue.clear()
        return taken


PAGES = PageTable()
"""The one table of this process."""
