"""Rows of the index file: how a page's row is written down, and validated when it comes back."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from sglang_canopy.disk.index import NO_ROW, OVER, SHARED, PageIndex
from sglang_canopy.disk.journal import Row, pack_units, unpack_units
from sglang_canopy.disk.page import PageMeta
from sglang_canopy.errors import CanopyError
from sglang_canopy.ttl.table import TTLTable

if TYPE_CHECKING:
    from sglang_canopy.disk.store import DiskStore


def record(index: PageIndex, row: int, ttl: TTLTable) -> Row:
    """The row as the journal's ``FIELDS``. A group is written as its root's id."""
    group = index.group[row]
    root = ttl.groups[group].root.to_bytes(8, "little") if 0 <= group < len(ttl.groups) else None
    return (
        row,
        index.keys[row],
        index.parent[row],
        pack_units(index.units(row)),
        index.stored[row],
        index.checksum(row).to_bytes(16, "little"),
        index.written[row],
        index.offset[row],
        index.tokens[row],
        index.turn[row],
        index.categories[index.category[row]],
        index.conversations[index.conversation[row]],
        index.tenants[index.tenant[row]],
        root,
        index.created[row],
        index.last_access[row],
        index.hits[row],
        index.keep_until[row],  # NaN is NULL in SQLite
        index.ttl_s[row],
        index.flags[row],
        index.history[row],
        index.return_at[row],
        index.slo_ms[row],
    )


def load_rows(store: DiskStore, now: float) -> bool:
    """Fill an empty store from its index file, leaving out whatever is not sound.

    A page comes back only below its prefix, in units that no other page claims and that the
    files are long enough for. Returns whether rows got new numbers.
    """
    rows: dict[int, Row] = {}
    unsound = []
    for row in store.journal.rows():
        if _sound(row, store):
            rows[row[0]] = row
        else:
            unsound.append(row[0])
    renumber = bool(rows) and max(rows) > 4 * len(rows) + store.units.limit + 1024
    below: dict[int, list[int]] = {}
    for number, row in rows.items():
        below.setdefault(row[2], []).append(number)
    roots = {group.root: i for i, group in enumerate(store.ttl.groups)}
    used: set[int] = set()
    ahead = 0
    order: list[tuple[int, int]] = [(number, NO_ROW) for number in below.get(NO_ROW, ())]
    entered: list[int] = []
    while order:
        number, parent = order.pop()
        row = rows[number]
        units = unpack_units(row[3])
        meta = _meta(row, roots)
        if meta is None or used.intersection(units) or row[1] in store.index.rows:
            continue
        used.update(units)
        ahead += meta.last_access > now or row[6] > now
        meta.last_access = min(meta.last_access, now)
        meta.created = min(meta.created, now)
        at = store.index.insert(row[1], parent, units, NO_ROW if renumber else number)
        store.index.stored[at] = row[4]
        store.index.set_checksum(at, int.from_bytes(row[5], "little"))
        store.index.written[at] = min(row[6], now)
        store.index.put(at, meta)
        store.shelf.charge(meta.tenant, row[4])
        entered.append(at)
        order.extend((child, at) for child in below.get(number, ()))
    bad = len(unsound) + len(rows) - len(entered)
    if not renumber:
        store._dirty.update(unsound)
        store._dirty.update(number for number in rows if store.index.keys_at(number) is None)
    store.index.settle()
    store.units.adopt(used)
    for at in reversed(entered):  # children first: a page was used when one below it was
        parent = store.index.parent[at]
        if parent != NO_ROW:
            last = store.index.last_access
            last[parent] = max(last[parent], last[at])
    for at in entered:
        store._set_expiry(at)
        store._pin_if_asked(at, now)
    for at in entered:
        store.shelf.settle(at, now)
    store.counters.dropped_at_start += bad
    if bad:
        store.faults.note("index", f"{bad} records were not usable", bad)
    if ahead:
        store.faults.note("clock", f"{ahead} pages were used in the future", ahead)
    return renumber


def _sound(row: Row, store: DiskStore) -> bool:
    number, key, parent, units, stored, checksum, written = row[:7]
    if not (
        type(number) is int
        and 0 <= number < 1 << 31
        and isinstance(key, bytes)
        and len(key) == 32
        and type(parent) is int
        and parent != number
        and isinstance(units, bytes)
        and 0 < len(units) <= 5 * 16
        and len(units) % 5 == 0
        and type(stored) is int
        and 0 < stored <= store.content.page_bytes
        and (store.content.compress or stored == store.content.page_bytes)
        and isinstance(checksum, bytes)
        and len(checksum) == 16
        and isinstance(written, float)
        and math.isfinite(written)
    ):
        return False
    numbers = unpack_units(units)
    if len(numbers) != store.content.units_for(stored) or len(set(numbers)) != len(numbers):
        return False
    last_bytes = stored - (len(numbers) - 1) * store.content.unit_bytes
    return all(store.segments.present(unit, last_bytes) for unit in numbers)


def _meta(row: Row, roots: dict[int, int]) -> PageMeta | None:
    values: Sequence[Any] = row[7:]
    (offset, tokens, turn, category, conversation, tenant, root, created, last, hits) = values[:10]
    keep, ttl_s, flags, history, back, slo = values[10:]
    if type(flags) is not int or not 0 <= flags < 4:
        return None
    group = roots.get(int.from_bytes(root, "little"), -1) if isinstance(root, bytes) else -1
    try:
        return PageMeta.from_json(
            {
                "offset": offset,
                "tokens": tokens,
                "category": category,
                "turn": turn,
                "conversation": conversation,
                "tenant": tenant,
                "group": group,
                "created": created,
                "last_access": last,
                "hits": hits,
                "keep_until": keep,
                "ttl_s": ttl_s,
                "shared": bool(flags & SHARED),
                "history": history,
                "over": bool(flags & OVER),
                "return_at": back,
                "slo_ms": slo,
            }
        )
    except CanopyError:
        return None
