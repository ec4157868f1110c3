"""Recount of a disk store: its index against its units, its labels and what may be evicted."""

from collections import Counter

from sglang_canopy.disk.index import NO_ROW
from sglang_canopy.disk.state import StoreState
from sglang_canopy.disk.store import DiskStore


def recount(store: DiskStore) -> None:
    """Recount the pages and the evictable pages. Raises AssertionError for an inconsistent state."""
    with store.state.lock:
        _recount_pages(store.state)
        _recount_evictable(store.state)


def count_bad_pages(store: DiskStore) -> int:
    """Recount the store, read every page, and return the number of those that are wrong."""
    recount(store)
    state = store.state
    with state.lock:
        return sum(not _is_correct(state, key, row) for key, row in state.index.row_of.items())


def _recount_pages(state: StoreState) -> None:
    index, units = state.index, state.units
    child_counts: dict[int, int] = {}
    used_units: set[int] = set()
    for key, row in index.row_of.items():
        assert index.key_of[row] == key, row
        parent = index.parent[row]
        if parent != NO_ROW:
            assert index.key_of[parent] is not None, f"page {row} without its prefix"
            child_counts[parent] = child_counts.get(parent, 0) + 1
        assert index.unit[row] not in used_units, f"unit {index.unit[row]} holds two pages"
        used_units.add(index.unit[row])
    rows = index.row_of.values()
    for row in rows:
        assert index.children[row] == child_counts.get(row, 0), row
    assert index.count_pages() == {
        "categories": Counter(index.label("category", row) for row in rows),
        "tenants": Counter(index.label("tenant", row) for row in rows),
        "groups": Counter(index.group[row] for row in rows),
    }
    assert len(used_units) == units.used_units, (len(used_units), units.used_units)
    unused_units = {*units._free_units, *units._freed_while_read, *units._unwritten_units}
    assert not used_units & unused_units
    assert units.end_unit == len(used_units) + len(unused_units), (used_units, unused_units)
    assert units.used_units * state.content.page_bytes <= state.capacity_bytes


def _recount_evictable(state: StoreState) -> None:
    """The policies rank exactly the evictable pages, and tenants are charged for theirs."""
    index, evictable = state.index, state.evictable_pages
    rows = index.row_of.values()
    leaves = evictable._leaf_by_row
    locked_rows = evictable._lock_counts
    expected_rows = {row for row in rows if index.children[row] == 0 and row not in locked_rows}
    assert set(leaves) == expected_rows, (set(leaves) ^ expected_rows, "evictable")
    assert {*map(id, evictable.policy.leaves())} == {*map(id, leaves.values())}
    pages_by_tenant = Counter(index.label("tenant", row) for row in rows)
    del pages_by_tenant[None]
    charged_bytes = {t: pages * evictable.page_bytes for t, pages in pages_by_tenant.items()}
    assert charged_bytes == evictable.tenant_bytes, (charged_bytes, evictable.tenant_bytes)


def _is_correct(state: StoreState, key: bytes, row: int) -> bool:
    index, content = state.index, state.content
    buffer = [memoryview(bytearray(content.page_bytes))]
    errors = state.segments.read([(index.unit[row], buffer)])
    return not any(errors) and content.checksum(key, buffer) == index.checksum(row)
