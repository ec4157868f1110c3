"""Namespaces without a server: they count against the capacity and are deleted when space is needed."""

import os
from pathlib import Path

import pytest

from sglang_canopy.disk.folder import RANK_SEPARATOR
from sglang_canopy.disk.store import DiskStore
from support.disk_pages import Clock, chain, content, page_metas, store_at

PAGE_BYTES = 64 << 10
OVERHEAD_BYTES = 128 << 10
"""Bytes of a namespace's index and small files."""


def open_store(folder: Path, namespace: str, capacity_pages: int = 16, **options) -> DiskStore:
    capacity_bytes = capacity_pages * PAGE_BYTES + OVERHEAD_BYTES
    sizes = {"page_bytes": PAGE_BYTES, "capacity_bytes": capacity_bytes}
    return store_at(folder, namespace=namespace, **{**sizes, **options})


def put(store: DiskStore, name: str, page_count: int) -> int:
    """Write a path of ``page_count`` pages; return how many of them are on disk."""
    keys = chain(name, page_count)
    parents = [None, *keys[:-1]]
    contents = [content(key, PAGE_BYTES) for key in keys]
    return sum(store.write(keys, contents, page_metas(page_count, 1e3), parents))


def add_idle_namespace(folder: Path, namespace: str, page_count: int, end_s: float) -> Path:
    """Return the folder of a namespace whose server wrote ``page_count`` pages and ended at ``end_s``."""
    closed_store = open_store(folder, namespace)
    assert put(closed_store, namespace, page_count) == page_count
    closed_store.close()
    for file in closed_store.path.rglob("*"):
        os.utime(file, (end_s, end_s))
    return closed_store.path


def test_ten_changes_of_model_stay_within_the_capacity(tmp_path) -> None:
    for number in range(10):
        running = open_store(tmp_path, f"model {number}")
        assert put(running, "a", 16) == 16
        assert running.counters.evicted_pages == {}
        running.close()
        stored_bytes = sum(file.stat().st_size for file in tmp_path.rglob("*"))
        assert stored_bytes <= 16 * PAGE_BYTES + 2 * OVERHEAD_BYTES


def test_the_oldest_namespace_is_deleted_first_and_none_of_a_running_server(tmp_path) -> None:
    other_server = open_store(tmp_path, "other")
    put(other_server, "a", 4)
    ranks = [f"server{RANK_SEPARATOR}{rank}" for rank in (0, 1)]
    middle, oldest, newest, rank_1 = (
        add_idle_namespace(tmp_path, name, 4, end_s)
        for name, end_s in (("b", 200.0), ("a", 100.0), ("c", 300.0), (ranks[1], 50.0))
    )
    rank_0 = open_store(tmp_path, ranks[0])
    assert put(rank_0, "x", 6) == 6
    assert all(path.exists() for path in (oldest, middle, newest))
    assert put(rank_0, "y", 6) == 6
    assert [path.exists() for path in (oldest, middle, newest)] == [False, True, True]
    assert put(rank_0, "z", 12) == 12
    assert not newest.exists()
    assert rank_1.exists()
    assert (other_server.path.exists(), other_server.count_leading(chain("a", 4))) == (True, 4)
    assert rank_0.count_leading(chain("z", 12)) == 12


@pytest.mark.parametrize("when_full", ["at start", "later"])
def test_a_volume_full_of_an_old_namespace_is_used_at_once(small_disk, when_full) -> None:
    store_folder = small_disk / "store"
    sizes = {"page_bytes": 4096, "capacity_bytes": 1 << 30}
    pages = 100 if when_full == "at start" else 30
    old_store = store_at(store_folder, namespace="old", **sizes)
    old_store.write(
        chain("old", pages),
        [content(key, 4096) for key in chain("old", pages)],
        page_metas(pages, 1e3),
        [None, *chain("old", pages)[:-1]],
    )
    old_store.close()
    new_store = store_at(store_folder, namespace="new", **sizes)
    assert new_store.unavailable is None
    for i in range(3):  # the first may fail for lack of space
        keys = chain(i, 10)
        contents = [content(key, 4096) for key in keys]
        new_store.write(keys, contents, page_metas(10, 1e3), [None, *keys[:-1]])
    assert new_store.count_leading(chain(2, 10)) == 10
    assert not old_store.path.exists()


def test_a_killed_servers_temporary_folder_is_deleted_at_the_next_start(tmp_path) -> None:
    killed, running = (
        open_store(tmp_path, f"m{RANK_SEPARATOR}{name}", is_temporary=True)
        for name in ("killed", "running")
    )
    put(killed, "a", 1)
    put(running, "a", 1)
    killed.state.journal.close()
    killed._lifecycle.claim.release()  # as at the end of a process
    lasting = add_idle_namespace(tmp_path, "lasting", 1, 1.0)
    assert (lasting.exists(), running.path.exists(), killed.path.exists()) == (True, True, False)
    assert running.count_leading(chain("a", 1)) == 1


def test_a_namespace_whose_server_ends_later_is_deleted_without_a_restart(tmp_path) -> None:
    clock = Clock(0.0)
    other, running = open_store(tmp_path, "other"), open_store(tmp_path, "mine", monotonic=clock)
    put(other, "a", 12)
    put(running, "b", 8)
    other.close()
    clock.now = 60.0
    put(running, "c", 4)
    assert not other.path.exists()


def test_the_ranks_of_a_server_share_the_capacity_that_idle_namespaces_occupy(tmp_path) -> None:
    names = [f"old{RANK_SEPARATOR}{rank}" for rank in range(2)]
    paths = [add_idle_namespace(tmp_path, name, 8, 100.0 + i) for i, name in enumerate(names)]
    ranks = [open_store(tmp_path, f"new{RANK_SEPARATOR}{rank}") for rank in range(2)]
    for rank in ranks:
        assert put(rank, "a", 7) == 7
    assert [path.exists() for path in paths] == [True, True]
    assert put(ranks[1], "b", 4) == 4
    assert [path.exists() for path in paths] == [False, True]
