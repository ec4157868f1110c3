"""The store's folder, or a file in it, is removed or replaced while the store is open."""

import errno
import os
import shutil
import sqlite3
import threading
from pathlib import Path

import pytest

from sglang_canopy.disk import segments
from sglang_canopy.disk.store import DiskStore
from support.disk_pages import PAGE, chain, get, put, store_at


@pytest.fixture(autouse=True)
def small_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several segment files, as with many GB."""
    monkeypatch.setattr(segments, "SEGMENT_BYTES", 8 * PAGE)


def remove(store: DiskStore, top: Path) -> None:
    shutil.rmtree(top)


def replace(store: DiskStore, top: Path) -> None:
    top.rename(top.with_name("moved"))
    store_at(top).close()


def empty(store: DiskStore, top: Path) -> None:
    for path in top.rglob("*"):
        if path.is_file():
            path.unlink()


def remove_segment(store: DiskStore, top: Path) -> None:
    (store.path / "segment-00000.kv").unlink()


def remove_index(store: DiskStore, top: Path) -> None:
    (store.path / "index.sqlite").unlink()


def remove_lock(store: DiskStore, top: Path) -> None:
    (store.path / "lock").unlink()


EVERY_WAY = pytest.mark.parametrize(
    "take_away", [remove, replace, empty, remove_segment, remove_index, remove_lock]
)


@EVERY_WAY
def test_it_is_reported_and_later_pages_go_to_a_new_folder(tmp_path, take_away):
    top = tmp_path / "store"
    store = store_at(top, pages=64)
    put(store, chain("x", 12))
    take_away(store, top)
    store.sweep()
    assert "removed or replaced" in store.unavailable
    assert store.counters.faults["gone"] == 1
    assert store.leading(chain("x", 12)) == 0 or store.unavailable
    assert not any(put(store, chain("y", 3)))
    assert store.open()
    assert all(put(store, chain("y", 3)))
    assert store.verify(pages=True) == 0
    store.close()
    again = store_at(top, pages=64)
    assert again.leading(chain("y", 3)) == 3
    assert again.verify(pages=True) == 0
    again.close()


@pytest.mark.parametrize("take_away", [remove, replace])
def test_no_write_goes_to_a_removed_folder(tmp_path, take_away):
    top = tmp_path / "store"
    store = store_at(top, pages=64)
    put(store, chain("x", 4))
    take_away(store, top)
    assert not any(put(store, chain("y", 3)))
    assert "removed or replaced" in store.unavailable
    store.close()


def test_a_second_server_in_the_new_folder_keeps_its_pages(tmp_path):
    top = tmp_path / "store"
    first = store_at(top, pages=64)
    put(first, chain("x", 4))
    shutil.rmtree(top)
    second = store_at(top, pages=64)
    assert second.unavailable is None
    put(second, chain("b", 12))
    put(first, chain("z", 16))
    first.sweep()
    assert not first.open()
    assert "another server" in first.unavailable
    assert second.verify(pages=True) == 0
    first.close()
    assert all(get(second, chain("b", 12)))
    put(second, chain("c", 4))
    second.close()
    restarted = store_at(top, pages=64)
    assert restarted.leading(chain("b", 12)) == 12
    assert restarted.leading(chain("c", 4)) == 4
    restarted.close()


@pytest.mark.parametrize("how", ["discarded", "damaged"])
def test_nothing_is_removed_from_a_second_servers_folder(tmp_path, how):
    top = tmp_path / "store"
    first = store_at(top, pages=64)
    put(first, chain("x", 4))
    shutil.rmtree(top)
    second = store_at(top, pages=64)
    put(second, chain("b", 12))
    if how == "discarded":
        first.discard()
    else:
        with pytest.raises((sqlite3.Error, OSError)):
            first.state.journal.start_over("damaged")
    assert all(get(second, chain("b", 12)))
    second.close()
    assert store_at(top, pages=64).leading(chain("b", 12)) == 12


def test_a_full_disk_freed_by_removing_the_folder_is_used_again(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    top = tmp_path / "store"
    store = store_at(top, pages=64)
    put(store, chain("x", 4))
    with monkeypatch.context() as disk:
        disk.setattr(segments.os, "pwritev", full)
        assert not any(put(store, chain("y", 3)))
        shutil.rmtree(top)
        store.sweep()
        assert store.open()
        assert not any(put(store, chain("y", 3)))
    store._writer._monotonic = lambda: float("inf")
    assert all(put(store, chain("y", 3)))
    assert store.verify(pages=True) == 0
    store.close()


def test_a_new_folder_that_the_full_disk_has_no_room_for_is_tried_again(tmp_path, monkeypatch):
    from sglang_canopy import private_file

    def full(*_args, **_named):
        raise OSError(errno.ENOSPC, "No space left on device")

    top = tmp_path / "store"
    store = store_at(top, pages=64)
    shutil.rmtree(top)
    store.sweep()
    with monkeypatch.context() as disk:
        disk.setattr(private_file.tempfile, "mkstemp", full)
        assert not store.open()
        assert "No space left" in store.unavailable
    assert store.open()
    assert all(put(store, chain("y", 3)))
    store.close()


def test_a_folder_of_other_files_is_not_touched(tmp_path):
    top = tmp_path / "store"
    store = store_at(top, pages=64)
    shutil.rmtree(top)
    top.mkdir()
    (top / "thesis.txt").write_text("mine")
    store.sweep()
    assert not store.open()
    assert "other files" in store.unavailable
    assert [path.name for path in top.iterdir()] == ["thesis.txt"]
    store.close()


def test_running_writers_and_readers_do_no_harm(tmp_path):
    """A write that began in the old folder is not found in the new folder, and all counts stay right."""
    top = tmp_path / "store"
    store = store_at(top, pages=64, quotas={"a": 64 * PAGE})
    assert all(put(store, chain("x", 4), tenant="a"))
    entered, go_on = threading.Event(), threading.Event()
    plain = store.state.segments.write

    def slow(extents):
        entered.set()
        assert go_on.wait(30)
        return plain(extents)

    store.state.segments.write = slow
    answers: list[bool] = []
    below = chain("x", 8)
    writer = threading.Thread(
        target=lambda: answers.extend(put(store, below[4:], below[3], tenant="a"))
    )
    writer.start()
    assert entered.wait(30)
    shutil.rmtree(top)
    store.sweep()
    assert store.open()
    assert all(put(store, chain("n", 4), tenant="a"))
    go_on.set()
    writer.join(30)
    assert not any(answers)
    assert store.leading(below) == 0
    assert store.verify(pages=True) == 0
    store.close()


def test_a_running_transfer_creates_no_file_in_the_new_folder(tmp_path, monkeypatch):
    top = tmp_path / "store"
    store = store_at(top, pages=64)
    entered, go_on = threading.Event(), threading.Event()
    plain = segments.SegmentFiles._open

    def slow(files, number, *, create):
        if create and number == 0:
            entered.set()
            assert go_on.wait(30)
        return plain(files, number, create=create)

    monkeypatch.setattr(segments.SegmentFiles, "_open", slow)
    answers: list[bool] = []
    writer = threading.Thread(target=lambda: answers.extend(put(store, chain("x", 4))))
    writer.start()
    assert entered.wait(30)
    shutil.rmtree(top)
    store.sweep()
    assert store.open()
    go_on.set()
    writer.join(30)
    assert answers == [False] * 4
    assert list(store.path.glob("segment-*")) == []
    store.close()


def test_files_are_closed_only_when_no_transfer_uses_them(tmp_path, monkeypatch):
    """Another file could get the number of a closed one, and a page would be written into it."""
    files = segments.SegmentFiles(os.open(tmp_path, os.O_RDONLY), PAGE)
    entered, go_on, closed = threading.Event(), threading.Event(), []
    plain_write, plain_close = segments.os.pwritev, segments.os.close

    def slow(*args):
        entered.set()
        assert go_on.wait(30)
        return plain_write(*args)

    monkeypatch.setattr(segments.os, "pwritev", slow)
    outcome: list[OSError | None] = []
    page = [memoryview(bytearray(PAGE))]
    writer = threading.Thread(target=lambda: outcome.extend(files.write([(0, page)])))
    writer.start()
    assert entered.wait(30)
    monkeypatch.setattr(segments.os, "close", lambda fd: (closed.append(fd), plain_close(fd)))
    files.close()
    assert not closed
    go_on.set()
    writer.join(30)
    assert outcome == [None]
    assert closed
    assert isinstance(files.write([(0, page)])[0], OSError)
