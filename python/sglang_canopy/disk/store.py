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

import dataclasses
import itertools
import operator
import os
import sqlite3
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from sglang_canopy.disk.clock import SteadyClock
from sglang_canopy.disk.content import Content, Page, raw_key
from sglang_canopy.disk.counters import Faults, StoreCounters
from sglang_canopy.disk.folder import Claim
from sglang_canopy.disk.index import NO_ROW, PageIndex
from sglang_canopy.disk.journal import damaged, kind_of
from sglang_canopy.disk.opening import Opening
from sglang_canopy.disk.page import PageMeta
from sglang_canopy.disk.records import record
from sglang_canopy.disk.segments import Units
from sglang_canopy.disk.shelf import Shelf
from sglang_canopy.errors import CanopyError
from sglang_canopy.policy.base import Policy
from sglang_canopy.records import Request
from sglang_canopy.ttl.table import TTLTable

GROWTH_RETRY_S = 30.0
"""How long a full disk is left alone before the files may grow again."""

_ENDS_A_COMMIT = 256
_STALE_A_COMMIT = 64
"""Rows whose use is written down with one commit, besides new pages: ends of used paths, and
others. A path's end is enough to know at the next start when all of the path was last used."""


class DiskStore(Opening):
    """See the module. ``upkeep.py`` has eviction, TTLs, pins and checks, ``opening.py`` the start.

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
        compress: bool = False,
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
        if pin_bytes is None:
            pin_bytes = capacity_bytes // 4
        if pin_tenant_bytes is None:
            pin_tenant_bytes = pin_bytes * 2 // 5
        _check_sizes(page_bytes, capacity_bytes, pin_bytes, pin_tenant_bytes, quotas)
        self.counters = counters or StoreCounters()
        self.faults = Faults(self.counters, str(folder))
        self.ttl = ttl or TTLTable()
        self.clock: Callable[[], float] = now or SteadyClock()
        self.capacity_bytes = capacity_bytes
        self.unavailable: str | None = "not open yet"
        """Why nothing is stored or found; ``None`` in working order."""
        self.lock = threading.RLock()
        whole_namespace = f"{namespace}|page_bytes={page_bytes}|compress={compress}"
        self.content = Content(page_bytes, compress=compress, namespace=whole_namespace)
        self.index = PageIndex()
        self.units = Units(capacity_bytes // self.content.unit_bytes)
        self.shelf = Shelf(
            self.index,
            policy,
            quotas or {},
            pin_bytes,
            pin_tenant_bytes,
        )
        self._monotonic = monotonic
        self._full_until = 0.0
        self._dirty: set[int] = set()
        self._stale: set[int] = set()
        """Rows whose use is not written down yet."""
        self._ends: dict[int, None] = {}
        """Those of them that end a used path, in the order of their use."""
        self._cursor = 0
        self._claim: Claim | None = None
        self._folder, self._namespace, self._temporary = folder, whole_namespace, temporary
        self.open()

    # ---- lookups ----

    def leading(self, keys: Sequence[str], now: float | None = None) -> int:
        """How many of ``keys``, from the first on, can be read.

        A page past its TTL ends the run, unless one after it in ``keys`` is not: a prefix
        lives as long as what is below it.
        """
        if self.unavailable:
            return 0
        now = self.clock() if now is None else now
        raw = [raw_key(key) for key in keys]
        found = alive = 0
        with self.lock:
            rows, expires = self.index.rows, self.index.expires
            for key in raw:
                row = rows.get(key)
                if row is None:
                    break
                found += 1
                if expires[row] > now:
                    alive = found
            counters = self.counters
            counters.lookups += len(raw)
            counters.found += alive
            counters.expired_lookups += found - alive
        return alive

    def meta(self, keys: Sequence[str]) -> list[PageMeta | None]:
        """What is known of these pages; ``None`` for one that is not here."""
        raw = [raw_key(key) for key in keys]
        with self.lock:
            rows = [self.index.rows.get(key) for key in raw]
            return [None if row is None else self.index.meta(row) for row in rows]

    def __len__(self) -> int:
        return len(self.index)

    # ---- reading ----

    def read(self, keys: Sequence[str], into: Sequence[Page]) -> list[bool]:
        """Fill the buffers of ``into``, page by page, up to the first that is not here.

        Every page is checked. A bad one is dropped with all that is below it; its buffer and
        those after it hold garbage then, and the answer for them is false. Expired pages that
        are still on disk are read: ``leading`` is where TTLs are kept.
        """
        ok = [False] * len(keys)
        if self.unavailable:
            return ok
        raw = [raw_key(key) for key in keys]
        content, now = self.content, self.clock()
        plan: list[tuple[int, int, int, list[memoryview], list[memoryview]]] = []
        held: list[int] = []
        pieces: list[tuple[int, list[memoryview]]] = []
        with self.lock:
            for i, key in enumerate(raw):
                row = self.index.rows.get(key)
                if row is None:
                    break
                target = content.parts(into[i])
                landing = content.landing(self.index.stored[row], target)
                units = self.index.units(row)
                held.extend(units)
                pieces.extend(content.pieces(units, landing))
                plan.append((row, self.index.checksum(row), len(units), target, landing))
            self.units.hold(held)
        errors = self.segments.read(pieces)
        good, at = 0, 0
        error: OSError | None = None
        for i, (_, checksum, unit_count, target, landing) in enumerate(plan):
            error = next((e for e in errors[at : at + unit_count] if e is not None), None)
            at += unit_count
            if error is not None or not content.unpack(landing, target):
                break
            if content.checksum(raw[i], target) != checksum:
                break
            good, ok[i] = good + 1, True
        with self.lock:
            self.units.release(held)
            self._count_reads(plan, raw, good, now)
            if good < len(plan):
                row, checksum = plan[good][:2]
                # The same page still, and not one that took its row meanwhile.
                if self.index.rows.get(raw[good]) == row and self.index.checksum(row) == checksum:
                    self.faults.note(
                        "corrupt" if error is None else kind_of(error),
                        error or f"page {keys[good][:16]}... does not match its checksum",
                    )
                    self.drop_below(row, "corrupt", now)
        if good < len(plan):
            self.flush()
        return ok

    def _count_reads(
        self, plan: Sequence[tuple[Any, ...]], raw: Sequence[bytes], good: int, now: float
    ) -> None:
        index, counters = self.index, self.counters
        for i in range(good):
            row = plan[i][0]
            counters.read += 1
            counters.read_bytes += self.content.page_bytes
            if index.keys[row] != raw[i]:
                continue  # it went while it was read; what was read is right all the same
            counters.by_category(counters.hits, index.categories[index.category[row]])
            if now > index.last_access[row]:
                index.last_access[row] = now
                self._set_expiry(row)
                self.shelf.changed(row, now)
                self._stale.add(row)

    # ---- writing ----

    def write(
        self,
        keys: Sequence[str],
        pages: Sequence[Page],
        metas: Sequence[PageMeta],
        parents: Sequence[str | None],
    ) -> list[bool]:
        """Store pages, shallowest first; ``parents``: the page before each, ``None`` at a root.

        True: it is on disk, and on record if the process ends now. False: its prefix is not
        here, there was no room for it, or the disk failed (a page whose record could not be
        written is served all the same while the process lives). A page that is here already is
        not written again but counts as used.
        """
        ok = [False] * len(keys)
        if self.unavailable:
            self.counters.refused["unavailable"] += len(keys)
            return ok
        raw = [raw_key(key) for key in keys]
        above = [None if parent is None else raw_key(parent) for parent in parents]
        with self.lock:
            absent = [i for i, key in enumerate(raw) if key not in self.index.rows]
        content = self.content
        parts = {i: content.parts(pages[i]) for i in absent}
        packed = {i: content.packed(view) for i, view in parts.items()}
        now = self.clock()

        placed: list[tuple[int, list[int]]] = []
        pieces: list[tuple[int, list[memoryview]]] = []
        held: list[int] = []
        with self.lock:
            self._allow_growth()
            coming: set[bytes] = set()
            here = [i for i, key in enumerate(raw) if key in self.index.rows]
            self.counters.present += len(here)
            for _, group in itertools.groupby(here, lambda i: _facts(metas[i])):
                same = list(group)
                run = dict.fromkeys(self.index.rows[raw[i]] for i in same)
                self._use(list(run), metas[same[0]], now, count=False)
            for i, key in enumerate(raw):
                if key in self.index.rows:
                    ok[i] = True
                elif key in coming:
                    continue  # the same page twice in one batch
                elif i not in packed:
                    self.counters.refused["no-prefix"] += 1  # it went while we looked
                else:
                    units = self._place(i, above[i], coming, packed[i], metas[i], held, now)
                    if units is not None:
                        coming.add(key)
                        placed.append((i, units))
                        pieces.extend(content.pieces(units, packed[i]))
        errors = self.segments.write(pieces)
        sums = {i: content.checksum(raw[i], parts[i]) for i, _ in placed}

        with self.lock:
            at, entered = 0, []
            for i, units in placed:
                error = next((e for e in errors[at : at + len(units)] if e is not None), None)
                at += len(units)
                size = sum(len(part) for part in packed[i])
                if error is None:
                    row = self._enter(raw[i], above[i], units, size, sums[i], metas[i], now)
                    if row != NO_ROW:
                        entered.append(row)
                        continue
                    self.units.give_back(units)
                else:
                    self._write_failed(error, units)
                self.shelf.discharge(metas[i].tenant, size)
            for row in entered:
                self.shelf.settle(row, now)
            for row in held:
                self.shelf.release(row, now)
            for i, key in enumerate(raw):
                ok[i] = ok[i] or key in self.index.rows
        return ok if self.flush() else [False] * len(keys)

    def _place(
        self,
        i: int,
        above: bytes | None,
        coming: set[bytes],
        packed: list[memoryview],
        meta: PageMeta,
        held: list[int],
        now: float,
    ) -> list[int] | None:
        """Units for one new page, evicting for them; ``None`` where it is not to be written."""
        counters = self.counters
        counters.by_category(counters.misses, meta.category)
        if above is not None and above not in coming:
            row = self.index.rows.get(above)
            if row is None:
                counters.refused["no-prefix"] += 1
                return None
            self.shelf.hold(row)
            held.append(row)
        size = sum(len(part) for part in packed)
        if not self._within_quota(meta.tenant, size, now):
            counters.refused["quota"] += 1
            return None
        count = self.content.units_for(size)
        if not self._make_room(count, now):
            counters.refused["capacity"] += 1
            return None
        self.shelf.charge(meta.tenant, size)
        return sorted(self.units.take(count))

    def _enter(
        self,
        key: bytes,
        above: bytes | None,
        units: list[int],
        size: int,
        checksum: int,
        meta: PageMeta,
        now: float,
    ) -> int:
        """The page's data is written: put it into the index. ``NO_ROW`` if that came to nothing:
        its prefix went meanwhile, or another writer was first."""
        index = self.index
        parent = NO_ROW if above is None else index.rows.get(above)
        if key in index.rows or parent is None:
            return NO_ROW
        row = index.insert(key, parent, tuple(units))
        index.stored[row] = size
        index.set_checksum(row, checksum)
        index.written[row] = now
        index.put(row, self._on_this_clock(meta, now))
        self._set_expiry(row)
        self._pin_if_asked(row, now)
        self._dirty.add(row)
        self.counters.written += 1
        self.counters.written_bytes += size
        return row

    def _write_failed(self, error: OSError, units: list[int]) -> None:
        kind = kind_of(error)
        self.faults.note(kind, error)
        self.counters.refused[kind] += 1
        if kind == "full":
            self.units.no_room(units)
            self._full_until = self._monotonic() + GROWTH_RETRY_S
        else:
            self.units.give_back(units)

    def _allow_growth(self) -> None:
        if not self.units.growth_allowed and self._monotonic() >= self._full_until:
            self.units.allow_growth()

    # ---- use ----

    def touch(self, keys: Sequence[str], meta: PageMeta) -> int:
        """A request used this run of pages, here or in a tier above. Returns pages found.

        ``meta.hits`` is the true number of uses where it is not 0; else this is one more.
        """
        if self.unavailable:
            return 0
        raw = [raw_key(key) for key in keys]
        now, run = self.clock(), []
        with self.lock:
            for key in raw:
                row = self.index.rows.get(key)
                if row is None:
                    break
                run.append(row)
            if run:
                self._use(list(dict.fromkeys(run)), meta, now, count=meta.hits < 1)
        return len(run)

    def arrive(self, request: Request) -> None:
        """A request comes in: the policy learns (see ``Policy.arrive``)."""
        with self.lock:
            self.shelf.arrive(request)

    def finish(self, request: Request) -> None:
        """The same request ended."""
        with self.lock:
            self.shelf.finish(request)

    # ---- the index file ----

    def flush(self, *, everything: bool = False) -> bool:
        """Commit what changed: new and gone pages always, mere uses in bounded portions.

        Returns whether all of it is on record.
        """
        if self.unavailable:
            return False
        with self.journal.lock:
            with self.lock:
                changed, self._dirty = self._dirty, set()
                for row in list(itertools.islice(self._ends, _ENDS_A_COMMIT)):
                    del self._ends[row]
                    if row in self._stale:
                        self._stale.discard(row)
                        changed.add(row)
                for _ in range(len(self._stale) if everything else _STALE_A_COMMIT):
                    if not self._stale:
                        break
                    changed.add(self._stale.pop())
                keys = self.index.keys
                live = [row for row in changed if 0 <= row < len(keys) and keys[row] is not None]
                put = [record(self.index, row, self.ttl) for row in live]
                gone = changed.difference(live)
            if not changed:
                return True
            try:
                self.journal.commit(put, gone)
            except (sqlite3.Error, OSError) as error:
                return self._commit_failed(error, changed)
            return True

    def _erase_records(self, rows: Sequence[int]) -> None:
        try:
            self.journal.erase()
        except (sqlite3.Error, OSError) as error:
            self._commit_failed(error, set(rows))

    def _commit_failed(self, error: sqlite3.Error | OSError, changed: set[int]) -> bool:
        """The pages stay known to this process, and are put on record as soon as that works."""
        self.faults.note(kind_of(error), f"index: {error}")
        with self.lock:
            self._dirty |= changed
        if not (isinstance(error, sqlite3.Error) and damaged(error)):
            return False
        try:  # a broken file is made anew from what is in memory
            self.journal.start_over()
            with self.lock:
                put = [record(self.index, row, self.ttl) for row in self.index.rows.values()]
                self._dirty.clear()
                self._stale.clear()
            self.journal.commit(put, ())
        except (sqlite3.Error, OSError) as again:
            self.faults.note(kind_of(again), f"index: {again}")
            with self.lock:
                self._dirty.update(self.index.rows.values())
            return False
        return True

    def close(self) -> None:
        """Write everything down and let the folder go. The store is empty to callers then."""
        if self.unavailable is None:
            with self.journal.lock, self.lock:  # in the order of every other method
                self.flush(everything=True)
                self.unavailable = "closed"
                self.journal.close()
                self.segments.close()
        if self._claim is not None:
            self._claim.release()
            self._claim = None


_facts = operator.attrgetter(*(f.name for f in dataclasses.fields(PageMeta)[2:]))
"""All that a page's metadata says but where the page lies (its fields after offset, tokens)."""


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
