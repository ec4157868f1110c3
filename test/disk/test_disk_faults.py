"""Every fault of the disk is logged once, counted, and reported as a miss."""

import errno
import json
import logging
import os
import resource
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from sglang_canopy.disk.journal import INDEX_FILE
from sglang_canopy.ttl.table import TTLTable
from support.disk_pages import PAGE_BYTES, Clock, chain, content, get, put, store_at
from support.disk_recount import count_bad_pages


def segment_of(store) -> Path:
    return next(store.path.rglob("segment-*.kv"))


def failing_call(error: Exception):
    """Return a substitute of a system call that fails, since a test cannot make a mounted disk fail."""

    def fail(*_):
        raise error

    return fail


def warning_messages(caplog) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def test_a_full_disk_keeps_its_pages_and_reuses_units(small_disk, caplog):
    store = store_at(small_disk / "store", pages=1000)
    stored = [put(store, chain(i, 10)) for i in range(60)]
    assert 0 < sum(map(sum, stored)) < 600
    assert store.counters.faults["full"] >= 1
    assert len([text for text in warning_messages(caplog) if "full" in text]) == 1
    # Every accepted page that is still stored is right.
    leading_pages = [store.count_leading(chain(i, 10)) for i in range(60)]
    readable = [i for i, count in enumerate(leading_pages) if all(get(store, chain(i, count)))]
    assert len(readable) == 60
    # The disk is still full, and newer pages take the place of older ones. (They are not
    # acknowledged, since the index had no room for their records.)
    store.clock.now += 10
    put(store, chain("late", 4))
    assert get(store, chain("late", 4)) == [True] * 4
    assert store.counters.evicted_pages["capacity"] >= 1
    assert count_bad_pages(store) == 0


def test_a_limit_on_file_size_is_a_full_disk(tmp_path):
    process = subprocess.run(
        [sys.executable, "-c", _PROGRAM, str(tmp_path / "store"), str(Path(__file__).parents[1])],
        capture_output=True,
        text=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (128 << 10, 128 << 10)),
    )
    assert process.returncode == 0, process.stderr
    counts = json.loads(process.stdout)
    assert 0 < counts["stored"] < 600
    assert counts["full"] >= 1
    assert counts["bad"] == 0
    # Acknowledged pages are read without the limit, or were evicted; no page is wrong.
    reopened = store_at(tmp_path / "store", pages=1000)
    assert len(reopened) > 0
    for i in range(60):
        get(reopened, chain(i, 10))
    assert count_bad_pages(reopened) == 0


_PROGRAM = """
import json, sys
sys.path.insert(0, sys.argv[2])
from pathlib import Path
from support.disk_pages import store_at, put, chain
from support.disk_recount import count_bad_pages
store = store_at(Path(sys.argv[1]), pages=1000)
stored = sum(sum(put(store, chain(i, 10))) for i in range(60))
full = store.counters.faults["full"]
print(json.dumps({"stored": stored, "full": full, "bad": count_bad_pages(store)}))
"""


def test_regained_disk_space_is_used(small_disk):
    """A disk that was full is tried again after a while."""
    now_s = 0.0
    ballast = small_disk / "ballast"
    ballast.write_bytes(bytes(150 << 10))
    store = store_at(small_disk / "store", pages=400, monotonic=lambda: now_s)
    for i in range(30):
        put(store, chain(i, 10))
    pages_before = len(store)
    assert store.counters.faults["full"] >= 1
    ballast.unlink()
    put(store, chain("x", 10))
    assert len(store) <= pages_before
    now_s = 31.0
    for i in range(30):
        put(store, chain(("y", i), 10))
    assert len(store) > pages_before
    assert count_bad_pages(store) == 0


def test_an_unexpected_error_leaves_no_lock_unit_or_charge(tmp_path, monkeypatch):
    store = store_at(tmp_path, pages=2)
    assert put(store, chain("a", 1), tenant="t") == [True]
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwritev", failing_call(MemoryError()))  # an error not of the disk
        with pytest.raises(MemoryError):
            put(store, [chain("a", 2)[1]], parent=chain("a", 1)[0], tenant="t")
    assert count_bad_pages(store) == 0
    store.clock.now += 10
    assert put(store, chain("b", 2)) == [True, True]  # evicts the parent, which is not locked
    assert count_bad_pages(store) == 0


def test_a_read_only_disk_at_start_means_no_disk_tier(small_disk, caplog):
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    store = store_at(small_disk / "store")
    assert "Read-only" in store.unavailable
    assert put(store, chain("a", 2)) == [False, False]
    assert store.count_leading(chain("a", 2)) == 0
    assert get(store, chain("a", 2)) == [False, False]
    assert store.sweep() == 0
    store.close()
    assert store.counters.faults == {"read-only": 1}
    assert store.counters.refused_pages == {"unavailable": 2}
    assert len(warning_messages(caplog)) == 1


def test_a_disk_that_turns_read_only_still_serves_its_pages(tmp_path, monkeypatch, caplog):
    store = store_at(tmp_path)
    put(store, chain("a", 2))
    monkeypatch.setattr(os, "pwritev", failing_call(OSError(errno.EROFS, "Read-only file system")))
    for i in range(3):
        assert put(store, chain(i, 2)) == [False, False]
    assert get(store, chain("a", 2)) == [True, True]
    assert store.counters.faults["read-only"] == 6
    assert len(warning_messages(caplog)) == 1
    assert count_bad_pages(store) == 0


def test_a_disk_that_cannot_be_read_loses_the_page_and_its_suffix(tmp_path, monkeypatch, caplog):
    store = store_at(tmp_path)
    put(store, chain("a", 3))
    monkeypatch.setattr(os, "preadv", failing_call(OSError(errno.EIO, "Input/output error")))
    assert get(store, chain("a", 3)) == [False] * 3
    assert store.counters.faults == {"io": 1}
    assert len(store) == 0
    assert len(warning_messages(caplog)) == 1


def test_a_corrupted_page_is_dropped_with_its_subtree(tmp_path, caplog):
    store = store_at(tmp_path, pages=16)
    shared_keys = chain("a", 3)
    put(store, shared_keys)
    put(store, chain("b", 2), parent=shared_keys[1])
    put(store, chain("c", 2))
    row = store.state.index.row_of[bytes.fromhex(shared_keys[1])]
    with open(segment_of(store), "r+b") as file:
        file.seek(store.state.index.unit[row] * PAGE_BYTES + 100)
        byte = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte[0] ^ 1]))
    assert get(store, shared_keys) == [True, False, False]
    assert store.count_leading(shared_keys) == 1
    assert store.meta(chain("b", 2)) == [None, None]
    assert get(store, chain("c", 2)) == [True, True]
    assert store.counters.faults == {"corrupt": 1}
    assert store.counters.evicted_pages == {"corrupt": 4}
    assert len(warning_messages(caplog)) == 1
    store.close()
    assert store_at(tmp_path, pages=16).count_leading(shared_keys) == 1


def test_a_truncated_segment_loses_only_the_cut_pages(tmp_path):
    store = store_at(tmp_path)
    put(store, chain("a", 6))
    store.close()
    os.truncate(segment_of(store), 4 * PAGE_BYTES + 10)
    reopened = store_at(tmp_path)
    assert reopened.count_leading(chain("a", 6)) == 4
    assert get(reopened, chain("a", 4)) == [True] * 4
    assert reopened.counters.dropped_rows == 2
    assert count_bad_pages(reopened) == 0


@pytest.mark.parametrize("damage", ["garbage", "cut", "empty", "missing", "foreign"])
def test_a_broken_index_serves_no_wrong_page(tmp_path, damage, caplog):
    store = store_at(tmp_path, pages=400)
    for i in range(30):
        put(store, chain(i, 10))
    store.close()
    index = store.state.journal.folder / INDEX_FILE
    index_bytes = index.stat().st_size
    if damage == "garbage":
        index.write_bytes(os.urandom(index_bytes))
    elif damage == "cut":
        os.truncate(index, index_bytes // 2)
    elif damage == "empty":
        os.truncate(index, 0)
    elif damage == "missing":
        index.unlink()
    else:
        index.unlink()
        with sqlite3.connect(index) as foreign:
            foreign.execute("CREATE TABLE pages (a, b)")
    reopened = store_at(tmp_path, pages=400)
    assert reopened.unavailable is None
    for i in range(30):
        keys = chain(i, 10)
        leading_pages = reopened.count_leading(keys)
        assert get(reopened, keys[:leading_pages]) == [True] * leading_pages
    if damage in ("garbage", "foreign"):
        assert len(reopened) == 0
        assert reopened.counters.faults["index"] == 1
        assert (reopened.state.journal.folder / f"{INDEX_FILE}.bad").exists()
    if damage in ("empty", "missing"):
        assert len(reopened) == 0
        assert reopened.counters.orphan_units == 300
    assert put(reopened, chain("new", 3)) == [True] * 3
    assert count_bad_pages(reopened) == 0


def test_an_index_that_breaks_in_use_is_rebuilt(tmp_path):
    store = store_at(tmp_path)
    put(store, chain("a", 2))
    store.state.journal._connection.execute("DROP TABLE pages")
    assert put(store, chain("b", 2)) == [True, True]
    assert store.counters.faults["index"] == 1
    store.close()
    reopened = store_at(tmp_path)
    assert reopened.count_leading(chain("a", 2)) == reopened.count_leading(chain("b", 2)) == 2


def test_a_wrong_index_serves_no_wrong_page(tmp_path):
    """Rows that point at other pages' bytes, share units, or lack their prefix."""
    store = store_at(tmp_path, pages=16)
    for name in "abc":
        put(store, chain(name, 3))
    store.close()
    with sqlite3.connect(store.state.journal.folder / INDEX_FILE) as index:
        ids = [row_id for (row_id,) in index.execute("SELECT id FROM pages ORDER BY id")]
        first_unit = index.execute("SELECT unit FROM pages WHERE id=?", (ids[0],)).fetchone()[0]
        index.execute("UPDATE pages SET unit=? WHERE id=?", (first_unit, ids[1]))
        select = "SELECT unit FROM pages WHERE id=?"
        units = [index.execute(select, (row_id,)).fetchone()[0] for row_id in ids[3:5]]
        index.execute("UPDATE pages SET unit=? WHERE id=?", (units[1], ids[3]))
        index.execute("UPDATE pages SET unit=? WHERE id=?", (units[0], ids[4]))
        index.execute("UPDATE pages SET parent=999 WHERE id=?", (ids[7],))
        index.execute("UPDATE pages SET hits='many' WHERE id=?", (ids[8],))
    reopened = store_at(tmp_path, pages=16)
    for name in "abc":
        get(reopened, chain(name, 3))  # asserts that the bytes are correct
    assert reopened.count_leading(chain("c", 3)) == 1
    assert reopened.counters.dropped_rows >= 3
    assert reopened.counters.faults["corrupt"] == 1
    assert count_bad_pages(reopened) == 0
    reopened.close()
    assert store_at(tmp_path, pages=16).counters.dropped_rows == 0


def test_pages_from_the_future_are_as_old_as_the_restart(tmp_path):
    store = store_at(tmp_path, clock=Clock(5e9), ttl=TTLTable(residual_ttl_s=100.0))
    put(store, chain("a", 2))
    store.close()
    reopened = store_at(tmp_path, clock=Clock(1000.0), ttl=TTLTable(residual_ttl_s=100.0))
    assert reopened.count_leading(chain("a", 2)) == 2
    assert reopened.counters.faults == {"clock": 2}
    reopened.clock.now += 101
    assert reopened.count_leading(chain("a", 2)) == 0


def test_data_without_a_record_is_swept_at_start(tmp_path):
    store = store_at(tmp_path)
    put(store, chain("a", 2))
    store.close()
    with open(segment_of(store), "ab") as file:
        file.write(content("without a record") * 3)
    reopened = store_at(tmp_path)
    assert reopened.counters.orphan_units == 3
    assert segment_of(reopened).stat().st_size == 2 * PAGE_BYTES


def test_a_page_whose_unit_was_overwritten_before_a_crash_is_absent(tmp_path):
    """The index still has the row of the page that was there before."""
    store = store_at(tmp_path)
    keys = chain("a", 3)
    put(store, keys)
    store.close()
    with open(segment_of(store), "r+b") as file:
        file.seek(2 * PAGE_BYTES)
        file.write(content("the next page"))
    reopened = store_at(tmp_path)
    assert get(reopened, keys) == [True, True, False]
    assert reopened.counters.faults == {"corrupt": 1}
