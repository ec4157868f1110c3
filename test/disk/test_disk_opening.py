"""A store's folder: unavailable at the start, abandoned, or gone while the server runs."""

import json
import os
import shutil
import sqlite3
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from sglang_canopy.disk import folder, segments
from sglang_canopy.disk.folder import MARK
from sglang_canopy.disk.journal import Journal
from support.disk_pages import PAGE, chain, get, put, store_at
from support.disk_recount import bad_pages

TESTS = Path(__file__).parents[1]


def test_a_busy_folder_is_used_with_its_pages_once_it_is_free(tmp_path, caplog) -> None:
    first = store_at(tmp_path)
    put(first, chain("a", 3))
    second = store_at(tmp_path)
    for _ in range(5):
        assert not second.open()
        assert "another server" in second.unavailable
    first.close()
    assert second.open()
    assert second.unavailable is None
    assert get(second, chain("a", 3)) == [True] * 3
    assert put(second, chain("b", 2)) == [True] * 2
    assert bad_pages(second) == 0
    assert second.counters.faults == {"locked": 1}
    assert len([r for r in caplog.records if "another server" in r.getMessage()]) == 1
    second.close()
    assert len(store_at(tmp_path)) == 5


STARTS = {
    "read-only": (folder, "_make_top", OSError(30, "Read-only file system")),
    "io": (segments.SegmentFiles, "trim", OSError(5, "Input/output error")),
    "busy": (Journal, "open", sqlite3.OperationalError("database is locked")),
}
"""What fails at a start, and how."""


@pytest.mark.parametrize("fault", STARTS)
def test_a_failed_start_leaves_nothing_behind_and_is_made_up_for(tmp_path, monkeypatch, fault):
    store = store_at(tmp_path)
    put(store, chain("a", 4), tenant="t")
    store.close()
    owner, name, error = STARTS[fault]

    def fail(*_):
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, fail)
        again = store_at(tmp_path, quotas={"t": 8 * PAGE})
        assert error.args[-1] in again.unavailable
        assert len(again) == len(again.state.evictable.tenant_bytes) == 0
        assert not list(again.policy.leaves())
    assert again.counters.faults.total() == 1
    assert again.open()
    assert get(again, chain("a", 4)) == [True] * 4
    assert bad_pages(again) == 0


def test_a_discarded_store_frees_its_disk_space_before_its_folder(tmp_path) -> None:
    store = store_at(tmp_path)
    put(store, chain("a", 3))
    path = store.path
    store.discard()
    assert not list(path.rglob("segment-*"))
    assert store.leading(chain("a", 3)) == 0
    again = store_at(tmp_path)
    assert again.path == path
    assert again.unavailable is None
    assert len(again) == 0


def test_a_temporary_store_leaves_no_folder(tmp_path) -> None:
    store = store_at(tmp_path, temporary=True)
    put(store, chain("a", 3))
    path = store.path
    store.discard()
    assert not path.exists()


def test_a_mark_that_was_never_written_is_made(tmp_path) -> None:
    """A crash or a full disk leaves such a folder, next to a partial write."""
    (tmp_path / MARK).touch()
    (tmp_path / f".{MARK}.k3v1").touch()
    store = store_at(tmp_path)
    assert store.unavailable is None
    assert put(store, chain("a", 2)) == [True] * 2
    assert (tmp_path / MARK).read_text().startswith("sglang-canopy disk store")


def test_a_mark_of_another_version_is_set_aside(tmp_path, caplog) -> None:
    (tmp_path / MARK).write_text("sglang-canopy disk store, version 99\n")
    assert store_at(tmp_path).unavailable is None
    assert "version 99" in (tmp_path / f"{MARK}.bad").read_text()
    assert caplog.text.count("cannot be used") == 1


def test_a_first_start_on_a_full_disk_is_made_up_for(tmp_path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _FULL_AT_FIRST, str(tmp_path / "store"), str(TESTS)],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {"faults": {"full": 1}, "stored": [True] * 3}
    assert len(store_at(tmp_path / "store")) == 3


_FULL_AT_FIRST = """
import json, resource, sys
sys.path.insert(0, sys.argv[2])
from pathlib import Path
from support.disk_pages import store_at, put, chain
resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))
store = store_at(Path(sys.argv[1]))
assert store.unavailable and not store.open()
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
assert store.open(), store.unavailable
print(json.dumps({"faults": store.counters.faults, "stored": put(store, chain("a", 3))}))
"""


@pytest.mark.parametrize("end", ["close", "discard", "clear"])
def test_a_second_server_in_the_new_folder_keeps_its_pages(tmp_path, end):
    top = tmp_path / "store"
    first = store_at(top, pages=64)
    put(first, chain("x", 4))
    shutil.rmtree(top)
    assert get(first, chain("x", 4)) == [True] * 4
    second = store_at(top, pages=64)
    put(second, chain("b", 12))
    put(first, chain("z", 16))
    getattr(first, end)()
    first.sweep()
    put(second, chain("c", 4))
    assert all(get(second, chain("b", 12)))
    assert bad_pages(second) == 0
    shutil.copytree(top, tmp_path / "copy")  # what a kill would leave
    again = store_at(tmp_path / "copy", pages=64)
    assert again.leading(chain("b", 12)) == 12
    assert again.leading(chain("c", 4)) == 4


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
