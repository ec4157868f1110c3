"""The disk tier: pages of KV in files, bounded in bytes, right or absent.

* The pages form a tree by parent key. A page is written only below one that is there, and goes
  only when nothing is below it: no page is kept whose prefix is gone.
* Which page goes is the ``Policy``'s choice; TTLs, quotas and pins narrow it.
* A record enters the index file after the page's data, in one transaction a batch; a checksum
  over namespace, key and content decides what is served. So slots are used again freely, and
  whatever a crash leaves behind is right or absent.
* A fault of the disk is logged once, counted, and answered "absent". Nothing is raised for it.

Keys are SGLang's page hashes, times seconds of the store's clock. Every method is thread-safe;
no lock is held during page I/O.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from sglang_canopy.disk.clock import SteadyClock
from sglang_canopy.disk.content import Content, PageBuffers, raw_key
from sglang_canopy.disk.counters import Faults, StoreCounters
from sglang_canopy.disk.evictable import EvictablePages
from sglang_canopy.disk.eviction import SWEEP_PAGES, Eviction
from sglang_canopy.disk.index import PageIndex
from sglang_canopy.disk.index_writer import IndexWriter
from sglang_canopy.disk.inspection import held_pages, stats, verify
from sglang_canopy.disk.lifetimes import Lifetimes
from sglang_canopy.disk.page import PageMeta
from sglang_canopy.disk.reader import PageReader
from sglang_canopy.disk.recovery import Recovery
from sglang_canopy.disk.state import StoreState
from sglang_canopy.disk.units import UnitAllocator
from sglang_canopy.disk.writer import PageWriter
from sglang_canopy.errors import CanopyError
from sglang_canopy.policy.base import Policy
from sglang_canopy.records import Request
from sglang_canopy.ttl.table import TTLTable


class DiskStore:
    """The parts share ``state``, and each does one thing: see the modules named after them.

    Raises ``CanopyError`` for impossible sizes, or a folder that is not ours. A disk that is
    full, read-only or in another server's hands makes a store in which nothing is found and
    nothing is kept (``unavailable`` says why) until ``open`` succeeds.
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
        pin_bytes: int | None = None,
        pin_tenant_bytes: int | None = None,
        now: Callable[[], float] | None = None,
        namespace: str = "",
        temporary: bool = False,
        counters: StoreCounters | None = None,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        """``pin_bytes``: how much pins may hold, a quarter of the capacity unless given;
        ``pin_tenant_bytes``: how much those of one tenant, two fifths of that unless given.

        ``quotas``: bytes by tenant; ``"*"`` is any other tenant. ``now``: the clock, by default
        wall time without its jumps. ``temporary``: no later store will ask for this namespace;
        its folder goes with it. ``counters``: those of a store before this one, to go on with.
        """
        pin_bytes = capacity_bytes // 4 if pin_bytes is None else pin_bytes
        pin_tenant_bytes = pin_bytes * 2 // 5 if pin_tenant_bytes is None else pin_tenant_bytes
        _check_sizes(page_bytes, capacity_bytes, pin_bytes, pin_tenant_bytes, quotas)
        # The last fact names the folder that stores of other versions use, so that it is taken over.
        namespace = f"{namespace}|page_bytes={page_bytes}|compress=False"
        index = PageIndex()
        self.capacity_bytes, self.policy = capacity_bytes, policy
        self.content = content = Content(page_bytes, namespace)
        self.counters = counters = counters or StoreCounters()
        self.clock = now or SteadyClock()
        self.state = state = StoreState(
            capacity_bytes=capacity_bytes,
            clock=self.clock,
            content=content,
            counters=counters,
            faults=Faults(counters, str(folder)),
            index=index,
            evictable=EvictablePages(
                index, policy, page_bytes, quotas or {}, pin_bytes, pin_tenant_bytes
            ),
            units=UnitAllocator(capacity_bytes // page_bytes),
            ttl=ttl or TTLTable(),
        )
        self._index_writer = records = IndexWriter(state)
        self._lifetimes = lifetimes = Lifetimes(state, records)
        self._eviction = eviction = Eviction(state, records)
        self._reader = PageReader(state, records, lifetimes, eviction)
        self._writer = PageWriter(state, records, lifetimes, eviction, monotonic)
        self._recovery = Recovery(
            state,
            records,
            lifetimes,
            eviction,
            folder=folder,
            namespace=namespace,
            temporary=temporary,
        )
        self.open()

    @property
    def unavailable(self) -> str | None:
        """Why nothing is stored or found; ``None`` in working order."""
        return self.state.unavailable

    @property
    def path(self) -> Path:
        """The namespace's own folder, once it was taken."""
        return self._recovery.path

    @property
    def ttl(self) -> TTLTable:
        return self.state.ttl

    # ---- opening and closing ----

    def open(self) -> bool:
        """Take the folder and load its index; ``unavailable`` says why where that fails.

        Call it again until it is true: what keeps the folder may pass. By one thread at a time.
        """
        return self._recovery.open()

    def close(self) -> None:
        """Write everything down and let the folder go. The store is empty to callers then."""
        self._recovery.close()

    def discard(self) -> None:
        """Close, and remove every page from the disk: nobody will ask for them again."""
        self._recovery.discard()

    # ---- pages ----

    def leading(self, keys: Sequence[str], now: float | None = None) -> int:
        """How many of ``keys``, from the first on, can be read.

        A page past its TTL ends the run, unless one after it in ``keys`` is not: a prefix
        lives as long as what is below it.
        """
        return self._reader.leading(keys, now)

    def meta(self, keys: Sequence[str]) -> list[PageMeta | None]:
        """The metadata of these pages; ``None`` for one that is not here."""
        state, raw = self.state, [raw_key(key) for key in keys]
        with state.lock:
            rows = [state.index.rows.get(key) for key in raw]
            return [None if row is None else state.index.meta(row) for row in rows]

    def __len__(self) -> int:
        return len(self.state.index)

    def read(self, keys: Sequence[str], into: Sequence[PageBuffers]) -> list[bool]:
        """Fill the buffers of ``into``, page by page, up to the first that is not here.

        Every page is checked. A bad one is dropped with all that is below it; its buffer and
        those after it hold garbage then, and the answer for them is false. Expired pages that
        are still on disk are read: ``leading`` is where TTLs are kept.
        """
        return self._reader.read(keys, into)

    def write(
        self,
        keys: Sequence[str],
        pages: Sequence[PageBuffers],
        metas: Sequence[PageMeta],
        parents: Sequence[str | None],
    ) -> list[bool]:
        """Store pages, shallowest first; ``parents``: the page before each, ``None`` at a root.

        True: it is on disk, and on record if the process ends now. False: its prefix is not
        here, there was no room for it, or the disk failed (a page whose record could not be
        written is served all the same while the process lives). A page that is here already is
        not written again but counts as used.
        """
        self._recovery.check_folder()
        return self._writer.write(keys, pages, metas, parents)

    def touch(self, keys: Sequence[str], meta: PageMeta) -> int:
        """A request used this run of pages, here or in a tier above. Returns pages found.

        ``meta.hits`` is the true number of uses where it is not 0; else this is one more.
        """
        return self._lifetimes.touch(keys, meta)

    def clear(self) -> None:
        """Remove every page, in one pass: a caller may be the thread that schedules requests."""
        self._eviction.clear()

    # ---- what stays ----

    def pin(self, keys: Sequence[str], until: float) -> int:
        """Keep these pages and all before them until then, whatever the policy and TTLs say.

        Stops at the first page that is not here or would exceed ``pin_bytes``. Returns the
        pages pinned.
        """
        return self._lifetimes.pin(keys, until)

    def sweep(self, now: float | None = None, limit: int = SWEEP_PAGES) -> int:
        """Remove expired pages, tails first; returns how many. Bounded work a call.

        Also lets ended pins go, writes uses down, and checks that the files are still in place.
        Call it about once a second.
        """
        self._recovery.check_folder(files=True)
        return self._eviction.sweep(now, limit)

    def flush(self, *, everything: bool = False) -> bool:
        """Commit what changed: new and gone pages always, mere uses in bounded portions.

        Returns whether all of it is on record.
        """
        return self._index_writer.flush(everything=everything)

    def arrive(self, request: Request) -> None:
        """A request comes in: the policy learns (see ``Policy.arrive``)."""
        with self.state.lock:
            self.state.evictable.arrive(request)

    def finish(self, request: Request) -> None:
        """The same request ended."""
        with self.state.lock:
            self.state.evictable.finish(request)

    # ---- what an operator sees ----

    def stats(self) -> dict[str, Any]:
        """Sizes, counters and the residency histogram; JSON-able."""
        return stats(self.state)

    def held_pages(self) -> dict[str, dict[Any, int]]:
        """Pages by ``categories``, ``tenants`` and ``groups`` (numbers in the TTL table)."""
        return held_pages(self.state)

    def verify(self, *, pages: bool = False) -> int:
        """Recount everything; with ``pages``, read and check every page too.

        Returns the pages that are bad (without ``pages``, 0). ``AssertionError`` where the
        books do not agree.
        """
        return verify(self.state, pages=pages)


def _check_sizes(
    page_bytes: int,
    capacity_bytes: int,
    pin_bytes: int,
    pin_tenant_bytes: int,
    quotas: Mapping[str, int] | None,
) -> None:
    if page_bytes < 1:
        raise CanopyError(f"disk store: page_bytes must be at least 1, got {page_bytes}")
    if capacity_bytes < page_bytes:
        raise CanopyError(
            f"disk store: capacity_bytes {capacity_bytes} holds no page of {page_bytes} bytes; "
            "give it more"
        )
    for name, size in (("pin_bytes", pin_bytes), ("pin_tenant_bytes", pin_tenant_bytes)):
        if size < 0:
            raise CanopyError(f"disk store: {name} must be 0 or more, got {size}")
    for tenant, size in (quotas or {}).items():
        if size < 0:
            raise CanopyError(
                f"disk store: the quota of {tenant!r} must be 0 or more bytes, got {size}"
            )
