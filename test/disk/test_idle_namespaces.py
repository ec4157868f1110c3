"""Namespaces without a server: they count against the capacity and go when their room is needed."""

import os
from pathlib import Path

import pytest

from sglang_canopy.disk.folder import RANK
from sglang_canopy.disk.store import DiskStore
from support.disk_pages import Clock, chain, content, metas, store_at

PAGE = 64 << 10
ROOM = 128 << 10
"""Bytes of an index and of the small files."""


def store(folder: Path, namespace: str, pages: int = 16, **options) -> DiskStore:
    sizes = {"page_bytes": PAGE, "capacity_bytes": pages * PAGE + ROOM}
    return store_at(folder, namespace=namespace, **{**sizes, **options})


def put(store: DiskStore, name: str, pages: int) -> int:
    """Write a path; return its pages that are on disk."""
    keys = chain(name, pages)
    parents = [None, *keys[:-1]]
    return sum(store.write(keys, [content(k, PAGE) for k in keys], metas(pages, 1e3), parents))


def left(folder: Path, namespace: str, pages: int, used: float) -> Path:
    """A server ran and ended at a time."""
    ended = store(folder, namespace)
    assert put(ended, namespace, pages) == pages
    ended.close()
    for file in ended.path.rglob("*"):
        os.utime(file, (used, used))
    return ended.path


def test_ten_changes_of_model_stay_within_the_capacity(tmp_path) -> None:
    for start in range(10):
        running = store(tmp_path, f"model {start}")
        assert put(running, "a", 16) == 16
        assert running.counters.evicted == {}
        running.close()
        size = sum(file.stat().st_size for file in tmp_path.rglob("*"))
        assert size <= 16 * PAGE + 2 * ROOM


def test_the_oldest_goes_first_and_none_of_a_server(tmp_path) -> None:
    other = store(tmp_path, "other")
    put(other, "a", 4)
    ranks = [f"mine{RANK}{rank}" for rank in (0, 1)]
    middle, oldest, newest, rank_1 = (
        left(tmp_path, name, 4, used)
        for name, used in (("b", 200.0), ("a", 100.0), ("c", 300.0), (ranks[1], 50.0))
    )
    mine = store(tmp_path, ranks[0])
    assert put(mine, "x", 6) == 6
    assert all(path.exists() for path in (oldest, middle, newest))
    assert put(mine, "y", 6) == 6
    assert [path.exists() for path in (oldest, middle, newest)] == [False, True, True]
    assert put(mine, "z", 12) == 12
    assert not newest.exists()
    assert rank_1.exists()
    assert (other.path.exists(), other.leading(chain("a", 4))) == (True, 4)
    assert mine.leading(chain("z", 12)) == 12


@pytest.mark.parametrize("volume_is_full", ["at start", "later"])
def test_a_volume_full_of_an_old_namespace_is_used_at_once(small_disk, volume_is_full) -> None:
    top = small_disk / "store"
    big = {"page_bytes": 4096, "capacity_bytes": 1 << 30}
    pages = 100 if volume_is_full == "at start" else 30
    old = store_at(top, namespace="old", **big)
    old.write(
        chain("old", pages),
        [content(k, 4096) for k in chain("old", pages)],
        metas(pages, 1e3),
        [None, *chain("old", pages)[:-1]],
    )
    old.close()
    new = store_at(top, namespace="new", **big)
    assert new.unavailable is None
    for i in range(3):  # the first may fail for lack of room
        keys = chain(i, 10)
        new.write(keys, [content(k, 4096) for k in keys], metas(10, 1e3), [None, *keys[:-1]])
    assert new.leading(chain(2, 10)) == 10
    assert not old.path.exists()


def test_what_a_killed_server_left_for_nobody_goes_at_the_next_start(tmp_path) -> None:
    killed, running = (
        store(tmp_path, name, temporary=True) for name in (f"m{RANK}killed", f"m{RANK}running")
    )
    put(killed, "a", 1)
    put(running, "a", 1)
    killed.state.journal.close()
    killed._lifecycle.claim.release()  # what the end of a process does
    lasting = left(tmp_path, "lasting", 1, 1.0)
    assert (lasting.exists(), running.path.exists(), killed.path.exists()) == (True, True, False)
    assert running.leading(chain("a", 1)) == 1


def test_a_neighbour_that_ends_later_is_found_without_a_restart(tmp_path) -> None:
    time = Clock(0.0)
    other, mine = store(tmp_path, "other"), store(tmp_path, "mine", monotonic=time)
    put(other, "a", 12)
    put(mine, "b", 8)
    other.close()
    time.now = 60.0
    put(mine, "c", 4)
    assert not other.path.exists()


def test_the_ranks_of_a_server_share_the_room_of_what_is_left(tmp_path) -> None:
    old = [left(tmp_path, f"old{RANK}{rank}", 8, 100.0 + rank) for rank in range(2)]
    ranks = [store(tmp_path, f"new{RANK}{rank}") for rank in range(2)]
    for rank in ranks:
        assert put(rank, "a", 7) == 7
    assert [path.exists() for path in old] == [True, True]
    assert put(ranks[1], "b", 4) == 4
    assert [path.exists() for path in old] == [False, True]
