"""Inspection of the disk store: its pages by label, and a recount."""

from __future__ import annotations

from collections import Counter
from typing import Any

from sglang_canopy.disk.index import NO_ROW, PageIndex
from sglang_canopy.disk.state import StoreState


def held_pages(state: StoreState) -> dict[str, dict[Any, int]]:
    """Return the number of pages by category, by tenant and by group of the TTL table."""
    with state.lock:
        return _pages_by_label(state.index)


def _pages_by_label(index: PageIndex) -> dict[str, dict[Any, int]]:
    return {
        "categories": index.labels["category"].uses(),
        "tenants": index.labels["tenant"].uses(),
        "groups": index.pages_by_group(),
    }


def verify(state: StoreState, *, pages: bool = False) -> int:
    """Recount the store; see ``DiskStore.verify``."""
    with state.lock:
        _recount(state)
        if not pages:
            return 0
        return sum(not _page_is_good(state, key, row) for key, row in state.index.rows.items())


def _recount(state: StoreState) -> None:
    index, units = state.index, state.units
    children: dict[int, int] = {}
    used: set[int] = set()
    for key, row in index.rows.items():
        assert index.keys[row] == key, row
        parent = index.parent[row]
        if parent != NO_ROW:
            assert index.keys[parent] is not None, f"page {row} without its prefix"
            children[parent] = children.get(parent, 0) + 1
        assert index.unit[row] not in used, f"unit {index.unit[row]} holds two pages"
        used.add(index.unit[row])
    for row in index.rows.values():
        assert index.children[row] == children.get(row, 0), row
    rows = index.rows.values()
    assert _pages_by_label(index) == {
        "categories": Counter(index.label("category", row) for row in rows),
        "tenants": Counter(index.label("tenant", row) for row in rows),
        "groups": Counter(index.group[row] for row in rows),
    }
    assert len(used) == units.used, (len(used), units.used)
    unused = units.unused_units()
    assert not used & unused
    assert len(used) + len(unused) == units.top, (len(used), len(unused), units.top)
    assert units.used * state.content.page_bytes <= state.capacity_bytes
    state.evictable.check()


def _page_is_good(state: StoreState, key: bytes, row: int) -> bool:
    index, content = state.index, state.content
    target = [memoryview(bytearray(content.page_bytes))]
    errors = state.segments.read([(index.unit[row], target)])
    return not any(errors) and content.checksum(key, target) == index.checksum(row)
