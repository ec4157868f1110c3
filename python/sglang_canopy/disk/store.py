"""The disk tier: pages of KV in files, bounded in bytes, correct or absent.

* Pages form a tree by parent key. A page is written only below an existing parent and removed only
  without children, so every page has its prefix on disk.
* The ``Policy`` chooses victims, within TTLs and quotas.
* A record is committed after the page's data, in one transaction per batch. A checksum over namespace,
  key and content is verified before a page is served, so units can be reused at once.
* Disk faults are logged once and counted; they raise no exception, and the pages count as absent.

Keys are SGLang's page hashes; times are seconds of the store's clock. Every method is thread-safe. No
lock is held during page I/O.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sglang_canopy.disk.content import Content, PageBuffers, raw_key
from sglang_canopy.disk.evictable_pages import EvictablePages
from sglang_canopy.disk.eviction import SWEEP_PAGES, Eviction
from sglang_canopy.disk.folder import namespace_folder
from sglang_canopy.disk.idle_namespaces import IdleNamespaces
from sglang_canopy.disk.index import PageIndex
from sglang_canopy.disk.index_writer import IndexWriter
from sglang_canopy.disk.lifecycle import Lifecycle
from sglang_canopy.disk.lifetimes import Lifetimes
from sglang_canopy.disk.page import PageMeta
from sglang_canopy.disk.state import StoreState
from sglang_canopy.disk.store_counters import Faults, StoreCounters, fault_kind
from sglang_canopy.disk.units import UnitAllocator
from sglang_canopy.disk.writer import PageWriter
from sglang_canopy.errors import CanopyError
from sglang_canopy.policy.base import Policy
from sglang_canopy.records import Request
from sglang_canopy.ttl.table import TTLTable


@dataclass(slots=True)
class _PageRead:
    """One page of a batch, with its index entry at the start of the batch."""

    key: bytes
    row: int
    checksum: int
    unit: int
    target: list[memoryview]


class DiskStore:
    """Facade over the modules of this package, which share ``state``.

    Raises ``CanopyError`` for invalid sizes, or a folder of another user or with other files. If the
    disk is full, read-only or locked by another server, the store is empty and stores no page until
    ``open`` succeeds; ``unavailable`` has the reason.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        page_bytes: int,
        capacity_bytes: int,
        policy: Policy,
        ttl: TTLTable | None = None,
        quotas: Mapping[str, int] | None = None,
        clock: Callable[[], float] | None = None,
        namespace: str = "",
        is_temporary: bool = False,
        counters: StoreCounters | None = None,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        """``quotas``: bytes by tenant; ``"*"`` is any other tenant. ``clock``: by default
        ``time.time``. ``is_temporary``: no later store uses this namespace; ``discard`` removes its
        folder. ``counters``: counters of a previous store, to be continued.
        """
        _check_sizes(page_bytes, capacity_bytes, quotas)
        namespace = f"{namespace}|page_bytes={page_bytes}"
        index = PageIndex()
        self.capacity_bytes = capacity_bytes
        self.content = content = Content(page_bytes, namespace)
        self.counters = counters = counters or StoreCounters()
        self.clock = clock or time.time
        self.state = state = StoreState(
            capacity_bytes=capacity_bytes,
            clock=self.clock,
            content=content,
            counters=counters,
            faults=Faults(counters, str(folder)),
            index=index,
            evictable_pages=EvictablePages(index, policy, page_bytes, quotas or {}),
            units=UnitAllocator(capacity_bytes // page_bytes),
            ttl=ttl or TTLTable(),
            idle_namespaces=IdleNamespaces(
                namespace_folder(folder, namespace), capacity_bytes, monotonic
            ),
        )
        self._index_writer = index_writer = IndexWriter(state)
        self._lifetimes = lifetimes = Lifetimes(state, index_writer)
        self._eviction = eviction = Eviction(state, index_writer)
        self._writer = PageWriter(state, index_writer, lifetimes, eviction, monotonic)
        self._lifecycle = Lifecycle(
            state,
            index_writer,
            lifetimes,
            eviction,
            folder=folder,
            namespace=namespace,
            is_temporary=is_temporary,
        )
        self.open()

    @property
    def unavailable(self) -> str | None:
        """Reason why the store is unavailable; ``None`` while it works."""
        return self.state.unavailable

    @property
    def path(self) -> Path:
        """Folder of the namespace; set by the first successful ``open``."""
        return self._lifecycle.path

    @property
    def policy(self) -> Policy:
        return self.state.evictable_pages.policy

    @property
    def ttl(self) -> TTLTable:
        return self.state.ttl

    # ---- opening and closing ----

    def open(self) -> bool:
        """Claim the folder and load its index. On failure, ``unavailable`` has the reason. Retry while
        it returns false: the cause may be temporary. Call it from one thread at a time."""
        return self._lifecycle.open()

    def close(self) -> None:
        """Commit all changes and release the folder. Afterwards the store appears empty."""
        self._lifecycle.close()

    def suspend(self, reason: str) -> bool:
        """Stop using a folder that does not respond, without I/O; ``open`` tries it again. Return
        whether the store is unavailable now. Unfinished writes enter no page."""
        return self._lifecycle.suspend(reason)

    def discard(self) -> None:
        """Close, and remove every page from the disk."""
        self._lifecycle.discard()

    # ---- pages ----

    def count_leading(self, keys: Sequence[str], now: float | None = None) -> int:
        """Return the number of leading ``keys`` that can be read. An expired page counts if a later
        page of the run has not expired: a prefix lives as long as its continuation."""
        state = self.state
        if state.unavailable:
            return 0
        now = state.clock() if now is None else now
        raw_keys = [raw_key(key) for key in keys]
        present_pages = unexpired_pages = 0
        with state.lock:
            rows, expires = state.index.row_of, state.index.expires
            for key in raw_keys:
                row = rows.get(key)
                if row is None:
                    break
                present_pages += 1
                if expires[row] > now:
                    unexpired_pages = present_pages
        return unexpired_pages

    def meta(self, keys: Sequence[str]) -> list[PageMeta | None]:
        """Return the metadata of each page, or ``None`` if it is not on disk."""
        state, raw_keys = self.state, [raw_key(key) for key in keys]
        with state.lock:
            rows = [state.index.row_of.get(key) for key in raw_keys]
            return [None if row is None else state.index.read_meta(row) for row in rows]

    def __len__(self) -> int:
        return len(self.state.index)

    def read(self, keys: Sequence[str], targets: Sequence[PageBuffers]) -> list[bool]:
        """Fill the buffers of ``targets`` up to the first missing page. Returns success per page. Every
        page is verified. A bad page is removed with its subtree; from its buffer on, the contents are
        undefined and the results false. Expired pages that are still on disk are read: only
        ``count_leading`` applies TTLs."""
        state = self.state
        if state.unavailable:
            return [False] * len(keys)
        raw_keys = [raw_key(key) for key in keys]
        now = state.clock()
        with state.lock:
            batch = self._locate(raw_keys, targets)
            units, allocator = [page.unit for page in batch], state.units
            generation, segments = state.index_generation, state.segments
            allocator.begin_read(units)
        errors = segments.read([(page.unit, page.target) for page in batch])
        good_pages, error = self._count_good(batch, errors)
        with state.lock:
            allocator.end_read(units)
            if generation != state.index_generation:  # the index was replaced
                return [i < good_pages for i in range(len(keys))]
            self._record_reads(batch[:good_pages], now)
            if good_pages < len(batch):
                self._drop_bad_page(batch[good_pages], error, keys[good_pages], now)
        if good_pages < len(batch):
            self._index_writer.flush()
        return [i < good_pages for i in range(len(keys))]

    def _locate(self, raw_keys: Sequence[bytes], targets: Sequence[PageBuffers]) -> list[_PageRead]:
        """Return the leading pages that are on disk."""
        index = self.state.index
        batch = []
        for key, buffers in zip(raw_keys, targets):
            row = index.row_of.get(key)
            if row is None:
                break
            target = self.state.content.views(buffers)
            batch.append(_PageRead(key, row, index.checksum(row), index.unit[row], target))
        return batch

    def _count_good(
        self, batch: Sequence[_PageRead], errors: Sequence[OSError | None]
    ) -> tuple[int, OSError | None]:
        """Return the number of leading good pages, and the I/O error of the next page, if any."""
        content = self.state.content
        for good_pages, (page, error) in enumerate(zip(batch, errors, strict=True)):
            if error is not None or content.checksum(page.key, page.target) != page.checksum:
                return good_pages, error
        return len(batch), None

    def _record_reads(self, pages: Sequence[_PageRead], now: float) -> None:
        state, index, counters = self.state, self.state.index, self.state.counters
        for page in pages:
            row = page.row
            counters.read_pages += 1
            counters.read_bytes += state.content.page_bytes
            if index.key_of[row] != page.key:
                continue  # removed during the read; the data read is valid
            if now > index.last_access[row]:
                index.last_access[row] = now
                self._lifetimes.set_expiry(row)
                state.evictable_pages.rerank(row, now)
                self._index_writer.mark_used((row,))

    def _drop_bad_page(self, page: _PageRead, error: OSError | None, key: str, now: float) -> None:
        state = self.state
        # Keep another page that took the row or the key during the read.
        if state.index.row_of.get(page.key) != page.row:
            return
        if state.index.checksum(page.row) != page.checksum:
            return
        state.faults.record(
            "corrupt" if error is None else fault_kind(error),
            error or f"page {key[:16]}... does not match its checksum",
        )
        self._eviction.remove_subtree(page.row, "corrupt", now)

    def write(
        self,
        keys: Sequence[str],
        pages: Sequence[PageBuffers],
        metas: Sequence[PageMeta],
        parents: Sequence[str | None],
    ) -> list[bool]:
        """Store pages, parents first. ``parents``: the key before each page, ``None`` at a root.
        Returns true for pages that are on disk and committed. False: the prefix is absent, there is no
        room, or the disk failed (a page whose commit failed is still served while the process lives). A
        page already on disk is not written again and counts as used."""
        self._lifecycle.open_cleared()
        return self._writer.write(keys, pages, metas, parents)

    def touch(self, keys: Sequence[str], meta: PageMeta) -> int:
        """Record one use of a run of pages, here or in a higher tier. Returns the pages found. If
        ``meta.hits`` is not 0, it is the true number of uses; otherwise one use is added."""
        return self._lifetimes.touch(keys, meta)

    def remove_tenant(self, tenant: str | None) -> int:
        """Remove a tenant's pages. Returns the number removed."""
        state, now = self.state, self.state.clock()
        if state.unavailable:
            return 0
        with state.lock:
            index, removed_pages = state.index, 0
            rows = [row for row in index.row_of.values() if index.label("tenant", row) == tenant]
            for row in sorted(rows, key=lambda row: -index.offset[row]):  # children first
                if not index.children[row]:
                    self._eviction.remove(row, "deleted", now)
                    removed_pages += 1
        self._index_writer.flush()
        return removed_pages

    def clear(self) -> None:
        """Remove every page, without I/O: the scheduler thread may call this. The next ``write``,
        ``sweep`` or ``close`` begins a new folder of pages and removes the old one. After a crash
        before that, the pages are on disk again."""
        self._lifecycle.clear()

    # ---- TTLs and uses ----

    def sweep(self, now: float | None = None, max_pages: int = SWEEP_PAGES) -> int:
        """Remove at most ``max_pages`` expired pages, leaves first. Returns the number removed. Also
        commit uses. Call it about once a second."""
        self._lifecycle.open_cleared()
        return self._eviction.sweep(now, max_pages)

    def flush(self, *, everything: bool = False) -> bool:
        """Commit all new and removed pages, and a bounded number of uses (all with ``everything``).
        Returns whether the commit succeeded."""
        return self._index_writer.flush(everything=everything)

    def arrive(self, request: Request) -> None:
        """Pass an arriving request to the policy (see ``Policy.arrive``)."""
        with self.state.lock:
            self.state.evictable_pages.arrive(request)

    def finish(self, request: Request) -> None:
        """Pass a finished request to the policy (see ``Policy.finish``)."""
        with self.state.lock:
            self.state.evictable_pages.finish(request)

    def count_pages(self) -> dict[str, dict[Any, int]]:
        """Return pages by ``categories``, ``tenants`` and ``groups`` (numbers in the TTL table)."""
        with self.state.lock:
            return self.state.index.count_pages()


def _check_sizes(page_bytes: int, capacity_bytes: int, quotas: Mapping[str, int] | None) -> None:
    if page_bytes < 1:
        raise CanopyError(f"disk store: page_bytes must be at least 1, got {page_bytes}")
    if capacity_bytes < page_bytes:
        raise CanopyError(
            f"disk store: capacity_bytes {capacity_bytes} holds no page of {page_bytes} bytes; "
            "give it more"
        )
    for tenant, size in (quotas or {}).items():
        if size < 0:
            raise CanopyError(f"disk store: quota of {tenant!r} must be 0 or more, got {size}")
