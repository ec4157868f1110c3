"""The part of the disk store that decides what stays: room, TTLs, pins, quotas, recounts."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from sglang_canopy.disk.content import Content, raw_key
from sglang_canopy.disk.counters import RESIDENCY_EDGES_S, Faults, StoreCounters
from sglang_canopy.disk.index import NO_ROW, OVER, SHARED, PageIndex, as_number
from sglang_canopy.disk.journal import Journal
from sglang_canopy.disk.page import PageMeta
from sglang_canopy.disk.segments import Segments, Units
from sglang_canopy.disk.shelf import Shelf
from sglang_canopy.ttl.table import TTLTable

SWEEP_ROWS = 65_536
"""Rows one ``sweep`` looks at, beginning where the last one ended."""
SWEEP_PAGES = 256
"""Pages one ``sweep`` removes at most."""
_EXPIRE_EVERY_S = 1.0


class Upkeep:
    """Base of ``DiskStore``. Methods with an underscore want ``lock`` to be held."""

    capacity_bytes: int
    clock: Callable[[], float]
    content: Content
    counters: StoreCounters
    faults: Faults
    index: PageIndex
    journal: Journal
    """Its lock comes before ``lock`` wherever both are taken."""
    lock: Any
    """A ``threading.RLock``."""
    segments: Segments
    shelf: Shelf
    ttl: TTLTable
    unavailable: str | None
    units: Units
    _cursor: int
    _dirty: set[int]
    _stale: set[int]
    _ends: dict[int, None]
    _looked_for_expired: float = -math.inf
    _clock_jumps: int = 0

    # ---- TTLs and pins ----

    def set_ttl(self, table: TTLTable) -> None:
        """New TTLs for all pages. A page keeps its group where the new table has its root."""
        with self.lock:
            index, top = self.index, self.index.top
            groups = index.array["group"][:top]
            new = np.asarray((*table.groups_after(self.ttl), -1), np.int32)
            groups[:] = np.where((groups >= 0) & (groups < len(new) - 1), new[groups], -1)
            self.ttl = table
            index.array["expires"][:top] = index.array["last_access"][:top] + self._ttls(top)
            for row in self._free_rows():
                index.expires[row] = math.inf
            for row in list(self.shelf.pinned()):
                self._set_expiry(row)

    def pin(self, keys: Sequence[str], until: float) -> int:
        """Keep these pages and all before them until then, whatever the policy and TTLs say.

        Stops at the first page that is not here or would exceed ``pin_bytes``. Returns the
        pages pinned.
        """
        if self.unavailable:
            return 0
        raw, pinned = [raw_key(key) for key in keys], 0
        with self.lock:
            for key in raw:
                row = self.index.rows.get(key)
                if row is None:
                    break
                self._keep(row, until)
                self._stale.add(row)
                if not self._pin_if_asked(row, self.clock()):
                    break
                pinned += 1
        return pinned

    def sweep(self, now: float | None = None, limit: int = SWEEP_PAGES) -> int:
        """Remove expired pages, tails first; returns how many. Bounded work a call.

        Also lets ended pins go and writes uses down. Call it about once a second.
        """
        if self.unavailable:
            return 0
        now = self.clock() if now is None else now
        with self.lock:
            self._notice_clock()
            self.shelf.release_pins(now, limit)
            removed = self._expire(now, limit)
        self.flush()
        return removed

    def flush(self, *, everything: bool = False) -> bool:
        raise NotImplementedError

    def _erase_records(self, rows: Sequence[int]) -> None:
        raise NotImplementedError

    def _expire(self, now: float, limit: int) -> int:
        index = self.index
        top = index.top
        if self._cursor >= top or top <= SWEEP_ROWS:
            self._cursor = 0
        window = slice(self._cursor, min(top, self._cursor + SWEEP_ROWS))
        expired = np.flatnonzero(
            (index.array["expires"][window] <= now) & (index.array["children"][window] == 0)
        )
        removed = 0
        for row in (expired + self._cursor).tolist():
            while row != NO_ROW and removed < limit:
                if index.keys[row] is None or index.children[row] or self.shelf.held(row):
                    break
                if index.expires[row] > now:
                    break
                row = self._remove(row, "ttl", now)
                removed += 1
        if removed < limit:
            self._cursor = window.stop
        self._looked_for_expired = now
        return removed

    def _ttls(self, top: int) -> Any:
        """The TTL of every row, in seconds."""
        index, table = self.index, self.ttl
        by_category = np.full(index.categories.capacity() + 1, table.residual_ttl_s)
        if table.categories:
            for number, category in index.categories.items():
                by_category[number] = table.ttl_s(-1, category)
        by_group = np.asarray([*(g.ttl_s for g in table.groups), math.nan])
        group = index.array["group"][:top]
        known = (group >= 0) & (group < len(table.groups))
        ttls = np.where(
            known, by_group[np.where(known, group, -1)], by_category[index.array["category"][:top]]
        )
        own = index.array["ttl_s"][:top]
        return np.where(np.isnan(own), ttls, own)

    def _set_expiry(self, row: int) -> None:
        index, own = self.index, self.index.ttl_s[row]
        ttl_s = self.ttl.ttl_s(
            index.group[row],
            index.categories[index.category[row]] if self.ttl.categories else None,
            None if math.isnan(own) else own,
        )
        expires = index.last_access[row] + ttl_s
        until = self.shelf.pinned_until(row)
        index.expires[row] = expires if until is None else max(expires, until)

    def _pin_if_asked(self, row: int, now: float) -> bool:
        until = self.index.keep_until[row]
        if not until > now:  # nan: nobody asked
            return False
        if (self.shelf.pinned_until(row) or until - 1) >= until:
            return True
        if not self.shelf.pin(row, until):
            self.counters.pins_refused += 1
            # Refused, it ranks like any other page; a shorter pin that it has goes on.
            self.index.keep_until[row] = as_number(self.shelf.pinned_until(row))
            return False
        self.counters.pinned += 1
        self._set_expiry(row)
        return True

    # ---- use ----

    def _use(self, run: Sequence[int], meta: PageMeta, now: float, *, count: bool) -> None:
        """A request used these pages. ``count`` it, unless ``meta`` has the true hits.

        Over columns, not page by page: a path may have thousands of pages.
        """
        index, array, meta = self.index, self.index.array, self._on_this_clock(meta, now)
        rows = np.asarray(run, np.int64)
        conversation = index.conversations.take(meta.conversation)
        before = array["conversation"][rows]
        other = (before != index.conversations.number(None)) & (before != conversation)
        flags = array["flags"][rows] & ~np.uint8(OVER)
        flags |= np.where(other | meta.shared, np.uint8(SHARED), np.uint8(0))
        if meta.over:
            flags |= np.where(flags & SHARED, np.uint8(0), np.uint8(OVER))
        array["flags"][rows] = flags
        index.conversations.move(before, conversation)
        array["conversation"][rows] = conversation
        index.conversations.drop(conversation)
        category = index.categories.take(meta.category)
        index.categories.move(array["category"][rows], category)
        array["category"][rows] = category
        index.categories.drop(category)

        hits = array["hits"][rows]
        array["hits"][rows] = hits + 1 if count else np.maximum(hits, meta.hits)
        array["last_access"][rows] = np.maximum(array["last_access"][rows], meta.last_access)
        array["history"][rows] = np.maximum(array["history"][rows], min(meta.history, 0x7FFFFFFF))
        for name, value in (
            ("turn", meta.turn),
            ("group", meta.group),
            ("keep_until", as_number(meta.keep_until)),
            ("ttl_s", as_number(meta.ttl_s)),
            ("return_at", as_number(meta.return_at)),
            ("slo_ms", as_number(meta.slo_ms)),
        ):
            array[name][rows] = value
        ttl_s = self.ttl.ttl_s(meta.group, meta.category, meta.ttl_s)
        array["expires"][rows] = array["last_access"][rows] + ttl_s
        if self.shelf.pinned_bytes or meta.keep_until is not None:
            self._keep_pins(run, now)
        for row in rows[array["children"][rows] == 0].tolist():
            self.shelf.changed(row, now)
        self._stale.update(run)
        self._ends[run[-1]] = None

    def _keep_pins(self, run: Sequence[int], now: float) -> None:
        """A use does not shorten a pin; it may ask for a longer one."""
        for row in run:
            until = self.shelf.pinned_until(row)
            if until is not None:
                self._keep(row, until)
                self._set_expiry(row)
            self._pin_if_asked(row, now)

    def _keep(self, row: int, until: float) -> None:
        """At least until then: a pin that was asked for may last longer."""
        if not self.index.keep_until[row] > until:
            self.index.keep_until[row] = until

    def _on_this_clock(self, meta: PageMeta, now: float) -> PageMeta:
        """A copy with its times on the store's clock, none of the past ones in the future."""
        skew = getattr(self.clock, "skew_s", 0.0)
        values = {name: getattr(meta, name) for name in PageMeta.__slots__}
        for name in ("created", "last_access"):
            values[name] = min(values[name] - skew, now)
        for name in ("keep_until", "return_at"):
            if values[name] is not None:
                values[name] -= skew
        return PageMeta(**values)

    def _notice_clock(self) -> None:
        jumps = getattr(self.clock, "jumps", 0)
        if jumps > self._clock_jumps:
            self.faults.note("clock", "the wall clock was set", jumps - self._clock_jumps)
            self._clock_jumps = jumps

    # ---- room ----

    def _make_room(self, count: int, now: float) -> bool:
        """Evict until ``count`` units are free; false where nothing more may go."""
        if self.units.available >= count:
            return True
        if not 0 <= now - self._looked_for_expired < _EXPIRE_EVERY_S:
            self._expire(now, SWEEP_PAGES)
        while self.units.available < count:
            choice = self.shelf.victim(now)
            if choice is None:
                return False
            self._remove(choice[0], "trim" if choice[1] else "capacity", now, chosen=True)
        return True

    def _within_quota(self, tenant: str | None, size: int, now: float) -> bool:
        """Evict among the tenant's own pages until ``size`` more bytes fit its quota."""
        quota = self.shelf.quota(tenant)
        if quota is None or tenant is None:
            return True
        while self.shelf.tenant_bytes.get(tenant, 0) + size > quota:
            choice = self.shelf.victim_of(tenant, now)
            if choice is None:
                return False
            self._remove(choice[0], "quota", now, chosen=True)
        return True

    def _remove(self, row: int, reason: str, now: float, *, chosen: bool = False) -> int:
        """A tip goes. Returns its parent's row, which may be a tip now."""
        index, stored = self.index, self.index.stored[row]
        leaf = self.shelf.take_off(row)
        self.shelf.gone(row, leaf, stored, chosen=chosen)
        self.counters.left(reason, stored, now - index.written[row])
        self.units.give_back(index.units(row))
        parent = index.remove(row)
        self._dirty.add(row)
        self._stale.discard(row)
        if parent != NO_ROW:
            self.shelf.settle(parent, now)
        return parent

    def drop_below(self, row: int, reason: str, now: float) -> int:
        """Remove ``row`` and every page below it, tails first. Returns the pages removed."""
        with self.lock:
            parents = self.index.array["parent"][: self.index.top]
            keys = self.index.keys
            order = np.argsort(parents, kind="stable")
            sorted_parents = parents[order]
            found, at = [row], 0
            while at < len(found):
                low, high = np.searchsorted(sorted_parents, [found[at], found[at] + 1])
                found.extend(r for r in order[low:high].tolist() if keys[r] is not None)
                at += 1
            for each in reversed(found):
                self._remove(each, reason, now)
            return len(found)

    def clear(self) -> None:
        """Remove every page, in one pass: a caller may be the thread that schedules requests."""
        if self.unavailable:
            return
        with self.journal.lock:
            with self.lock:
                rows = self._forget_pages(self.clock())
            self._erase_records(rows)

    def _forget_pages(self, now: float) -> list[int]:
        index, rows = self.index, list(self.index.rows.values())
        at = np.asarray(rows, np.int64)
        stored = index.array["stored"][at].astype(np.int64)
        self.counters.all_left("cleared", stored, now - index.array["written"][at])
        numbers = index.array["tenant"][at]
        for number, tenant in list(index.tenants.items()):
            self.shelf.discharge(tenant, int(stored[numbers == number].sum()))
        self.shelf.clear()
        self.units.give_back(index.array["unit"][at].tolist())
        for more in index.more_units.values():
            self.units.give_back(more)
        index.clear()
        for changed in (self._dirty, self._stale, self._ends):
            changed.clear()
        return rows

    def _shrink_to_fit(self, now: float) -> None:
        """At start: fewer bytes are allowed than an earlier run used."""
        index, units = self.index, self.units
        while units.used > units.limit:
            choice = self.shelf.victim(now)
            row = choice[0] if choice is not None else next(iter(self.shelf.pinned_tips()), None)
            if row is None:
                break
            self._remove(row, "capacity", now, chosen=choice is not None)
        units.shrink()
        beyond = [
            row for row in index.rows.values() if max(index.units(row), default=0) >= units.limit
        ]
        for row in beyond:
            old = index.units(row)
            new = sorted(units.take(len(old)))
            buffers = [memoryview(bytearray(index.stored[row]))]
            self.segments.read(self.content.pieces(old, buffers))
            self.segments.write(self.content.pieces(new, buffers))
            units.forget(old)
            index.unit[row] = new[0]
            if len(new) > 1:
                index.more_units[row] = tuple(new[1:])
            self._dirty.add(row)

    # ---- what an operator sees ----

    def stats(self) -> dict[str, Any]:
        """Sizes, counters and the residency histogram; JSON-able."""
        with self.lock:
            self._notice_clock()
            index = self.index
            return {
                "unavailable": self.unavailable,
                "pages": len(index),
                "bytes": self.units.used * self.content.unit_bytes,
                "capacity_bytes": self.capacity_bytes,
                "tips": len(self.shelf),
                "pinned_bytes": self.shelf.pinned_bytes,
                "pin_bytes": self.shelf.pin_bytes,
                "pin_tenant_bytes": self.shelf.pin_tenant_bytes,
                "pinned_tenants": self.shelf.pinned_tenants(),
                "tenants": len(self.shelf.tenant_bytes),
                "index_memory_bytes": index.memory_bytes(),
                "residency_edges_s": list(RESIDENCY_EDGES_S),
                **self.counters.to_json(),
            }

    def verify(self, *, pages: bool = False) -> int:
        """Recount everything; with ``pages``, read and check every page too.

        Returns the pages that are bad (without ``pages``, 0). ``AssertionError`` where the
        books do not agree.
        """
        with self.lock:
            index = self.index
            children: dict[int, int] = {}
            used: set[int] = set()
            for key, row in index.rows.items():
                assert index.keys[row] == key, row
                parent = index.parent[row]
                if parent != NO_ROW:
                    assert index.keys[parent] is not None, f"page {row} without its prefix"
                    children[parent] = children.get(parent, 0) + 1
                mine = set(index.units(row))
                assert not mine & used, f"units {mine & used} hold two pages"
                used |= mine
            for row in index.rows.values():
                assert index.children[row] == children.get(row, 0), row
            assert len(used) == self.units.used, (len(used), self.units.used)
            free = self.units.free_units()
            assert not used & free
            assert len(used) + len(free) == self.units.top, (len(used), len(free), self.units.top)
            assert self.units.used * self.content.unit_bytes <= self.capacity_bytes
            self.shelf.check()
            if not pages:
                return 0
            bad = 0
            for key, row in index.rows.items():
                target = [memoryview(bytearray(self.content.page_bytes))]
                landing = self.content.landing(index.stored[row], target)
                errors = self.segments.read(self.content.pieces(index.units(row), landing))
                good = not any(errors) and self.content.unpack(landing, target)
                bad += not (good and self.content.checksum(key, target) == index.checksum(row))
            return bad

    def _free_rows(self) -> list[int]:
        return [row for row, key in enumerate(self.index.keys) if key is None]
