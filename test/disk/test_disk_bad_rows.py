"""A store starts and works with any rows in its index, and with a folder of another version."""

import math
import shutil
import sqlite3
import tempfile
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from sglang_canopy.disk.journal import INDEX_FILE, RECORD_FIELDS
from support.disk_pages import chain, get, put, store_at
from support.disk_recount import recount

MIN_INT, MAX_INT = -(1 << 63), (1 << 63) - 1
EDGE_VALUES = [
    sign * (1 << bits) + difference
    for bits in (0, 7, 8, 31, 32, 40, 53, 62)
    for sign in (-1, 1)
    for difference in (-1, 0, 1)
]
CELL_VALUES = st.one_of(
    st.none(),
    st.sampled_from([*EDGE_VALUES, MIN_INT, MAX_INT, 0]),
    st.integers(-16, 16),
    st.floats(allow_nan=False),
    st.sampled_from([math.inf, -math.inf, 1e308, 1e13, 1e14]),
    st.text(max_size=300),
    st.binary(max_size=40),
    st.binary(min_size=1, max_size=3).map(lambda raw: ("text", raw)),
)


@pytest.fixture(scope="module")
def stored_folder() -> Iterator[Path]:
    """A folder with three paths of three pages each."""
    with tempfile.TemporaryDirectory() as folder:
        store = store_at(Path(folder) / "store", pages=16)
        for name in "abc":
            put(store, chain(name, 3), tenant="t", category="chat", conversation=7)
        store.close()
        yield Path(folder) / "store"


def damage(folder: Path, row: int, field: str, value: Any) -> None:
    """Write ``value`` into a field of a row; ``("text", raw)`` are bytes declared as text."""
    with closing(sqlite3.connect(next(folder.rglob(INDEX_FILE)))) as index, index:
        cell = "?"
        if isinstance(value, tuple):
            value, cell = value[1], "CAST(? AS TEXT)"
        ids = [row_id for (row_id,) in index.execute("SELECT id FROM pages ORDER BY id")]
        try:
            index.execute(f'UPDATE pages SET "{field}"={cell} WHERE id=?', (value, ids[row]))
        except sqlite3.Error:  # not even SQLite takes it as a row's id
            index.rollback()


ROW_CHANGE = st.tuples(st.integers(0, 8), st.sampled_from(RECORD_FIELDS), CELL_VALUES)
ROW_CHANGES = st.lists(ROW_CHANGE, max_size=4)
"""Up to four of (row, field, the field's new value)."""


def check_start_and_use(stored_folder: Path, changes: list) -> None:
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "store"
        shutil.copytree(stored_folder, folder)
        for change in changes:
            damage(folder, *change)
        store = store_at(folder, pages=16)
        assert store.unavailable is None
        assert len(store) + store.counters.dropped_rows == 9
        for name in "abc":
            get(store, chain(name, 3))  # asserts that the pages served are correct
        put(store, chain("new", 3))
        assert all(get(store, chain("new", 3)))
        store.sweep()
        recount(store)
        store.close()
        reopened = store_at(folder, pages=16)
        assert reopened.unavailable is None
        assert reopened.counters.dropped_rows == 0
        assert all(get(reopened, chain("new", 3)))
        recount(reopened)
        reopened.close()


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(changes=ROW_CHANGES)
@example([(0, "unit", 255)])
@example([(1, "length", 1 << 32)])
@example([(1, "turn", 1 << 41)])
@example([(1, "category", ("text", b"\xff\xfe"))])
@example([(0, "id", -1)])
@example([(0, "id", MAX_INT)])
def test_a_store_with_any_rows_starts_and_works(stored_folder, changes) -> None:
    check_start_and_use(stored_folder, changes)


@pytest.mark.long
@settings(max_examples=400, deadline=None, suppress_health_check=list(HealthCheck))
@given(changes=ROW_CHANGES)
def test_a_store_with_any_rows_starts_and_works_many_times(stored_folder, changes) -> None:
    check_start_and_use(stored_folder, changes)


@pytest.mark.parametrize("field", ["length", "turn", "offset"])
def test_a_row_with_a_number_out_of_range_is_dropped(stored_folder, tmp_path, field) -> None:
    folder = tmp_path / "store"
    shutil.copytree(stored_folder, folder)
    damage(folder, 2, field, 1 << 62)
    store = store_at(folder, pages=16)
    assert (len(store), store.counters.dropped_rows) == (8, 1)
    assert store.counters.faults["index"] == 1


STATE_FIXTURES = Path(__file__).parents[1] / "fixtures" / "state"


def test_a_store_of_an_older_version_is_logged_once_and_deleted_for_space(tmp_path, caplog) -> None:
    folder = tmp_path / "disk"
    shutil.copytree(STATE_FIXTURES / "v3" / "disk", folder)
    with caplog.at_level("INFO"):
        store = store_at(folder)
    assert (store.unavailable, len(store)) == (None, 0)
    assert [record.getMessage().split(" ")[1] for record in caplog.records] == ["holds"]
    assert put(store, chain("a", 3)) == [True] * 3
    assert [path.name for path in folder.glob("*/")] == [store.path.name]


def test_a_store_of_a_newer_version_starts_empty(tmp_path) -> None:
    store = store_at(tmp_path)
    put(store, chain("a", 3))
    store.close()
    with closing(sqlite3.connect(store.state.journal.folder / INDEX_FILE)) as index:
        index.execute("PRAGMA user_version=99")
    reopened = store_at(tmp_path)
    assert (reopened.unavailable, len(reopened)) == (None, 0)
    assert put(reopened, chain("a", 3)) == [True] * 3
