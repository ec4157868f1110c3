"""Rows of the index file: how a page's row is encoded, and validated when it is read back."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from sglang_canopy.disk import page
from sglang_canopy.disk.content import Content
from sglang_canopy.disk.index import PageIndex
from sglang_canopy.disk.page import Kind, PageMeta
from sglang_canopy.errors import CanopyError
from sglang_canopy.ttl.table import TTLTable

_OF_STORE = ("id", "key", "parent", "units", "stored", "checksum", "written")
"""``id`` is a row number, ``parent`` another or -1; ``units`` are 5-byte numbers."""
FIELDS = (*_OF_STORE, *page.FIELDS)
"""Columns of the index file. A page's group is written as the id of the group's root, in bytes."""

Row = tuple[Any, ...]


def record(index: PageIndex, row: int, ttl: TTLTable) -> Row:
    """The row as ``FIELDS``."""
    meta = index.meta(row)
    values = {name: getattr(meta, name) for name in page.FIELDS}
    listed = 0 <= meta.group < len(ttl.groups)
    values["group"] = ttl.groups[meta.group].root.to_bytes(8, "little") if listed else None
    return (
        row,
        index.keys[row],
        index.parent[row],
        pack_units(index.units(row)),
        index.stored[row],
        index.checksum(row).to_bytes(16, "little"),
        index.written[row],
        *values.values(),
    )


def is_sound(row: Row, content: Content) -> bool:
    """Whether the row's number, parent, units and sizes are of one of our pages."""
    number, key, parent, units, stored, checksum, written = row[: len(_OF_STORE)]
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
        and 0 < stored <= content.page_bytes
        and (content.compress or stored == content.page_bytes)
        and isinstance(checksum, bytes)
        and len(checksum) == 16
        and isinstance(written, float)
        and math.isfinite(written)
    ):
        return False
    numbers = unpack_units(units)
    return len(numbers) == content.units_for(stored) == len(set(numbers))


def decode_meta(row: Row, roots: dict[int, int]) -> PageMeta | None:
    """The row's metadata; ``None`` where a field is out of range. ``roots``: groups by root."""
    values = dict(zip(page.FIELDS, row[len(_OF_STORE) :], strict=True))
    root = values["group"]
    number = int.from_bytes(root, "little") if isinstance(root, bytes) else None
    values["group"] = -1 if number is None else roots.get(number, -1)
    for name, kind in page.FIELDS.items():
        if kind is Kind.FLAG and values[name] in (0, 1):
            values[name] = bool(values[name])
    try:
        return PageMeta.from_json(values)
    except CanopyError:
        return None


def pack_units(units: Iterable[int]) -> bytes:
    return b"".join(unit.to_bytes(5, "little") for unit in units)


def unpack_units(blob: bytes) -> tuple[int, ...]:
    return tuple(int.from_bytes(blob[i : i + 5], "little") for i in range(0, len(blob), 5))
