"""Another capacity while the store is in use: what stays, what goes, and what a crash leaves."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sglang_canopy.errors import CanopyError
from support.disk_pages import PAGE, chain, get, put, store_at


def file_bytes(store) -> int:
    return sum(path.stat().st_size for path in store.path.glob("segment-*.kv"))


def sweep_all(store) -> None:
    for _ in range(100):
        store.sweep()
        if not store.state.resizing:
            return
    raise AssertionError("not done")


def test_a_larger_capacity_holds_at_once(tmp_path) -> None:
    store = store_at(tmp_path, pages=4)
    for i in range(3):
        put(store, chain(i, 2))
        store.clock.now += 1
    assert len(store) == 4
    store.set_capacity(8 * PAGE)
    assert store.stats()["capacity_bytes"] == 8 * PAGE
    assert store.stats()["pin_bytes"] == 2 * PAGE
    put(store, chain(3, 2))
    put(store, chain(4, 2))
    assert len(store) == 8
    sweep_all(store)
    store.verify(pages=True)


def test_a_smaller_one_evicts_the_policys_victims_moves_the_rest_and_cuts_the_files(
    tmp_path,
) -> None:
    store = store_at(tmp_path, pages=64)
    for i in range(16):
        put(store, chain(i, 4))
        store.clock.now += 1
    store.set_capacity(8 * PAGE)
    assert put(store, chain("new", 1)) == [False]  # nothing is written until there is room
    sweep_all(store)
    assert len(store) == 8
    assert all(get(store, chain(14, 4)))  # the last used
    store.clock.now += 1
    assert all(get(store, chain(15, 4)))
    assert file_bytes(store) <= 8 * PAGE
    store.verify(pages=True)
    store.clock.now += 1
    assert put(store, chain("new", 2)) == [True, True]
    assert len(store) == 8
    store.close()
    again = store_at(tmp_path, pages=8)
    assert len(again) == 8
    assert all(get(again, chain(15, 4)))


def test_there_and_back_restores_every_limit(tmp_path) -> None:
    store = store_at(tmp_path, pages=64, pin_bytes=3 * PAGE)
    before = {k: v for k, v in store.stats().items() if k.endswith("_bytes")}
    store.set_capacity(8 * PAGE)
    sweep_all(store)
    store.set_capacity(64 * PAGE)
    sweep_all(store)
    after = {k: v for k, v in store.stats().items() if k.endswith("_bytes")}
    assert after == before
    for i in range(16):
        assert all(put(store, chain(i, 4)))
    assert len(store) == 64
    store.verify(pages=True)


def test_a_pin_outlasts_a_smaller_capacity_while_anything_else_can_go(tmp_path) -> None:
    store = store_at(tmp_path, pages=32, pin_tenant_bytes=8 * PAGE)
    for i in range(8):
        put(store, chain(i, 4))
    store.pin(chain(0, 4), store.clock() + 1000)
    store.set_capacity(6 * PAGE)
    sweep_all(store)
    assert all(get(store, chain(0, 4)))
    store.set_capacity(2 * PAGE)
    sweep_all(store)
    assert len(store) == 2
    store.verify(pages=True)


def test_a_reader_of_a_page_that_moves_gets_the_page(tmp_path) -> None:
    store = store_at(tmp_path, pages=16)
    for i in range(4):
        put(store, chain(i, 4))
        store.clock.now += 1
    read = store.state.segments.read

    def moved_meanwhile(extents):
        store.state.segments.read = read
        store.set_capacity(4 * PAGE)
        store.sweep()
        return read(extents)

    store.state.segments.read = moved_meanwhile
    assert all(get(store, chain(3, 4)))
    sweep_all(store)
    assert file_bytes(store) <= 4 * PAGE
    store.verify(pages=True)


def test_less_than_a_page_is_refused_and_changes_nothing(tmp_path) -> None:
    store = store_at(tmp_path, pages=4)
    with pytest.raises(CanopyError, match="holds no page"):
        store.set_capacity(PAGE - 1)
    assert store.capacity_bytes == 4 * PAGE


@settings(
    max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    st.integers(0, 1000),
    st.lists(st.tuples(st.integers(1, 40), st.integers(0, 6), st.booleans()), max_size=5),
    st.booleans(),
)
def test_pages_are_right_or_absent_whatever_capacity_comes_when(
    tmp_path: Path, seed: int, changes: list[tuple[int, int, bool]], compress: bool
) -> None:
    """A copy of the folder, taken between two steps, is what a crash leaves."""
    folder = tmp_path / "s"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.rmtree(tmp_path / "c", ignore_errors=True)
    draw = random.Random(seed)
    store = store_at(folder, pages=24, compress=compress)
    for pages, sweeps, crash in changes:
        for _ in range(draw.randrange(6)):
            put(store, chain(draw.randrange(12), draw.randint(1, 5)))
            store.clock.now += 1
        store.set_capacity(pages * PAGE)
        put(store, chain(draw.randrange(12), 2))
        for _ in range(sweeps):
            store.sweep()
        for i in range(12):
            get(store, chain(i, 5))
        store.verify(pages=True)
        if crash:
            shutil.copytree(folder, tmp_path / "c", dirs_exist_ok=True)
            left = store_at(tmp_path / "c", pages=pages, compress=compress)
            for i in range(12):
                get(left, chain(i, 5))
            left.verify(pages=True)
            left.discard()
            shutil.rmtree(tmp_path / "c")
    sweep_all(store)
    store.verify(pages=True)
    assert store.state.units.used <= store.state.units.limit
    assert file_bytes(store) <= store.capacity_bytes
    store.close()
