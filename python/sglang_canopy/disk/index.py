"""Every page on disk, in memory: key -> row, and the row's columns.

Columns are NumPy arrays (for sweeps over all rows) seen through memoryviews (for single
values, which are several times faster that way). A row number is a page's identity in the
index file as well, and is used again after the page is gone.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from sglang_canopy.disk.labels import NO_LABEL, Labels
from sglang_canopy.disk.page import PageMeta
from sglang_canopy.records import Leaf

NO_ROW = -1
Column = Any
"""A memoryview over one of the arrays; its values are plain ints or floats."""
SHARED, OVER = 1, 2
"""Bits of the column ``flags``."""
_NAN = math.nan

COLUMNS: dict[str, Any] = {
    "parent": np.int32,
    "children": np.int32,
    "unit": np.int64,
    "stored": np.uint32,
    "check_high": np.uint64,
    "check_low": np.uint64,
    "written": np.float64,
    "expires": np.float64,
    "offset": np.int64,
    "tokens": np.int32,
    "turn": np.int32,
    "category": np.int32,
    "conversation": np.int32,
    "tenant": np.int32,
    "group": np.int32,
    "created": np.float64,
    "last_access": np.float64,
    "hits": np.int64,
    "keep_until": np.float64,
    "ttl_s": np.float64,
    "flags": np.uint8,
    "history": np.int32,
    "return_at": np.float64,
    "slo_ms": np.float32,
}


class PageIndex:
    """The table of pages. Not thread-safe: the store's lock guards it."""

    parent: Column
    children: Column
    unit: Column
    stored: Column
    check_high: Column
    check_low: Column
    written: Column
    expires: Column
    offset: Column
    tokens: Column
    turn: Column
    category: Column
    conversation: Column
    tenant: Column
    group: Column
    created: Column
    last_access: Column
    hits: Column
    keep_until: Column
    ttl_s: Column
    flags: Column
    history: Column
    return_at: Column
    slo_ms: Column

    def __init__(self) -> None:
        self.rows: dict[bytes, int] = {}
        self.keys: list[bytes | None] = []
        self.more_units: dict[int, tuple[int, ...]] = {}
        """Units after the first, of pages that have several."""
        self.categories = Labels()
        self.conversations = Labels()
        self.tenants = Labels()
        self.array: dict[str, Any] = {name: np.zeros(0, t) for name, t in COLUMNS.items()}
        self._free: list[int] = []
        self._grow(256)

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def top(self) -> int:
        """Rows are below this number."""
        return len(self.keys)

    def insert(self, key: bytes, parent: int, units: tuple[int, ...], row: int = NO_ROW) -> int:
        """A new page below ``parent`` (a row, or ``NO_ROW``). Its metadata is yet to be ``put``."""
        assert key not in self.rows, key
        if row == NO_ROW:
            row = self._free.pop() if self._free else len(self.keys)
        while row >= len(self.keys):
            self.keys.append(None)
        if row >= len(self.parent):
            self._grow(max(row + 1, 2 * len(self.parent)))
        assert self.keys[row] is None, row
        self.rows[key] = row
        self.keys[row] = key
        self.parent[row] = parent
        self.children[row] = 0
        if parent != NO_ROW:
            self.children[parent] += 1
        self.set_units(row, units)
        self.category[row] = self.conversation[row] = self.tenant[row] = NO_LABEL
        return row

    def remove(self, row: int) -> int:
        """A page without children goes. Returns its parent's row."""
        key = self.keys[row]
        assert key is not None, row
        assert self.children[row] == 0, (row, self.children[row])
        del self.rows[key]
        self.keys[row] = None
        self.more_units.pop(row, None)
        self._drop_labels(row)
        self._free.append(row)
        self.expires[row] = math.inf
        parent = int(self.parent[row])
        if parent != NO_ROW:
            self.children[parent] -= 1
        return parent

    def clear(self) -> None:
        """Every page goes. Row numbers stay: a reader or writer may still come back with one."""
        self.rows.clear()
        self.keys = [None] * len(self.keys)
        self.more_units.clear()
        self.categories, self.conversations, self.tenants = Labels(), Labels(), Labels()
        self.array["children"][:] = 0
        self.array["category"][:] = NO_LABEL
        self.array["expires"][:] = math.inf
        self.collect_free_rows()

    def collect_free_rows(self) -> None:
        """After rows were inserted under given numbers: the gaps are free."""
        self._free = [row for row in range(len(self.keys) - 1, -1, -1) if self.keys[row] is None]

    def free_rows(self) -> list[int]:
        return [row for row, key in enumerate(self.keys) if key is None]

    def key_at(self, row: int) -> bytes | None:
        """The key in a row; ``None`` for a free row, or one that never was."""
        return self.keys[row] if row < len(self.keys) else None

    def units(self, row: int) -> tuple[int, ...]:
        return (self.unit[row], *self.more_units.get(row, ()))

    def set_units(self, row: int, units: tuple[int, ...]) -> None:
        """The page lies elsewhere from now on, in as many units."""
        self.unit[row] = units[0]
        if len(units) > 1:
            self.more_units[row] = units[1:]

    def checksum(self, row: int) -> int:
        return (self.check_high[row] << 64) | self.check_low[row]

    def set_checksum(self, row: int, value: int) -> None:
        self.check_high[row] = value >> 64
        self.check_low[row] = value & 0xFFFFFFFFFFFFFFFF

    def put(self, row: int, meta: PageMeta) -> None:
        """Write all of ``meta`` into the row."""
        labels = (
            self.categories.take(meta.category),
            self.conversations.take(meta.conversation),
            self.tenants.take(meta.tenant),
        )
        self._drop_labels(row)
        self.category[row], self.conversation[row], self.tenant[row] = labels
        self.offset[row] = meta.offset
        self.tokens[row] = meta.tokens
        self.turn[row] = meta.turn
        self.group[row] = meta.group
        self.created[row] = meta.created
        self.last_access[row] = meta.last_access
        self.hits[row] = meta.hits
        self.keep_until[row] = as_number(meta.keep_until)
        self.ttl_s[row] = as_number(meta.ttl_s)
        self.flags[row] = SHARED * meta.shared + OVER * meta.over
        self.history[row] = min(meta.history, 0x7FFFFFFF)
        self.return_at[row] = as_number(meta.return_at)
        self.slo_ms[row] = as_number(meta.slo_ms)

    def meta(self, row: int) -> PageMeta:
        flags = self.flags[row]
        return PageMeta(
            offset=self.offset[row],
            tokens=self.tokens[row],
            category=self.categories[self.category[row]],
            turn=self.turn[row],
            conversation=self.conversations[self.conversation[row]],
            tenant=self.tenants[self.tenant[row]],
            group=self.group[row],
            created=self.created[row],
            last_access=self.last_access[row],
            hits=self.hits[row],
            keep_until=_or_none(self.keep_until[row]),
            ttl_s=_or_none(self.ttl_s[row]),
            shared=bool(flags & SHARED),
            history=self.history[row],
            over=bool(flags & OVER),
            return_at=_or_none(self.return_at[row]),
            slo_ms=_or_none(self.slo_ms[row]),
        )

    def fill(self, leaf: Leaf, row: int) -> None:
        """Write the row into a policy's leaf."""
        self.meta(row).apply_to(leaf)
        leaf.offset = self.offset[row]
        leaf.length = self.tokens[row]

    def memory_bytes(self) -> int:
        """Bytes of the columns, keys and mapping (an estimate without the labels' texts)."""
        columns = sum(a.nbytes for a in self.array.values())
        key_objects = sum(33 + len(k) for k in self.rows)
        return columns + key_objects + self.rows.__sizeof__() + self.keys.__sizeof__()

    def pages_by_group(self) -> dict[int, int]:
        """How many pages are in each group of the TTL table."""
        array, top = self.array, self.top
        used = array["group"][:top][array["category"][:top] != NO_LABEL]
        groups, counts = np.unique(used, return_counts=True)
        return dict(zip(groups.tolist(), counts.tolist()))

    def _drop_labels(self, row: int) -> None:
        if self.category[row] == NO_LABEL:
            return
        self.categories.drop(self.category[row])
        self.conversations.drop(self.conversation[row])
        self.tenants.drop(self.tenant[row])
        self.category[row] = NO_LABEL

    def _grow(self, capacity: int) -> None:
        for name, old in self.array.items():
            # A row that was never used has no label, as one that is free again.
            new: Any = np.full(capacity, NO_LABEL if name == "category" else 0, old.dtype)
            new[: len(old)] = old
            self.array[name] = new
            setattr(self, name, memoryview(new))


def as_number(value: float | None) -> float:
    """As the columns hold it."""
    return _NAN if value is None else value


def _or_none(value: float) -> float | None:
    return None if math.isnan(value) else value
