"""Recount of a disk store: its index against its units, its labels and what may be evicted."""

from collections import Counter

from sglang_canopy.disk.index import NO_ROW
from sglang_canopy.disk.state import StoreState
from sglang_canopy.disk.store import DiskStore


def recount(store: DiskStore) -> None:
    """Fail for inconsistent state."""
    with store.state.lock:
        _recount_pages(store.state)
        _recount_evictable(store.state)


def count_bad_pages(store: DiskStore) -> int:
    """Recount the store, read every page, and return the number of those that are wrong."""
    recount(store)
    state = store.state
    with state.lock:
        return sum(not _is_good(state, key, row) for key, row in state.index.rows.items())


def _recount_pages(state: StoreState) -> None:
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
    rows = index.rows.values()
    for row in rows:
        assert index.children[row] == children.get(row, 0), row
    assert index.count_pages() == {
        "categories": Counter(index.label("category", row) for row in rows),
        "tenants": Counter(index.label("tenant", row) for row in rows),
        "groups": Counter(index.group[row] for row in rows),
    }
    assert len(used) == units.used_units, (len(used), units.used_units)
    unused = {*units._free, *units._freed_while_read, *units._unwritten}
    assert not used & unused
    assert len(used) + len(unused) == units.end_unit, (len(used), len(unused), units.end_unit)
    assert units.used_units * state.content.page_bytes <= state.capacity_bytes


def _recount_evictable(state: StoreState) -> None:
    """The policies rank exactly the evictable pages, and tenants are charged for theirs."""
    index, evictable = state.index, state.evictable_pages
    rows = index.rows.values()
    leaves = evictable._leaves
    locked = evictable._lock_counts
    expected = {row for row in rows if index.children[row] == 0 and row not in locked}
    assert set(leaves) == expected, (set(leaves) ^ expected, "evictable")
    assert {*map(id, evictable.policy.leaves())} == {*map(id, leaves.values())}
    tenants = Counter(index.label("tenant", row) for row in rows)
    charged = {t: n * evictable.page_bytes for t, n in tenants.items() if t is not None}
    assert charged == evictable.tenant_bytes, (charged, evictable.tenant_bytes)


def _is_good(state: StoreState, key: bytes, row: int) -> bool:
    index, content = state.index, state.content
    target = [memoryview(bytearray(content.page_bytes))]
    errors = state.segments.read([(index.unit[row], target)])
    return not any(errors) and content.checksum(key, target) == index.checksum(row)
