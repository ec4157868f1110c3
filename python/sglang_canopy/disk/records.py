"""Rows of the index file: how a page's row is encoded, and validated when it is read back."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from sglang_canopy.disk.content import Content
from sglang_canopy.disk.index import OVER, SHARED, PageIndex
from sglang_canopy.disk.journal import Row, pack_units, unpack_units
from sglang_canopy.disk.page import PageMeta
from sglang_canopy.errors import CanopyError
from sglang_canopy.ttl.table import TTLTable


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


def is_sound(row: Row, content: Content) -> bool:
    """Whether the row's number, parent, units and sizes are of one of our pages."""
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
