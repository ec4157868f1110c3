"""A store's folder: unavailable at the start, abandoned, or deleted while the server runs."""

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
from sglang_canopy.disk.folder import MARK_FILE
from sglang_canopy.disk.journal import Journal
from support.disk_pages import PAGE_BYTES, chain, get, put, store_at
from support.disk_recount import count_bad_pages

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
    assert count_bad_pages(second) == 0
    assert second.counters.faults == {"locked": 1}
    assert caplog.text.count("another server") == 1
    second.close()
    assert len(store_at(tmp_path)) == 5


START_FAULTS = {
    "read-only": (folder, "_make_store_folder", OSError(30, "Read-only file system")),
    "io": (segments.SegmentFiles, "trim", OSError(5, "Input/output error")),
    "busy": (Journal, "open", sqlite3.OperationalError("database is locked")),
}
"""Failures of a start: the function's owner and name, and the error that it raises."""


@pytest.mark.parametrize("fault", START_FAULTS)
def test_a_store_opens_with_its_pages_after_a_failed_start(tmp_path, monkeypatch, fault):
    store = store_at(tmp_path)
    put(store, chain("a", 4), tenant="t")
    store.close()
    owner, function_name, error = START_FAULTS[fault]

    def fail(*_):
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(owner, function_name, fail)
        reopened = store_at(tmp_path, quotas={"t": 8 * PAGE_BYTES})
        assert error.args[-1] in reopened.unavailable
        assert len(reopened) == len(reopened.state.evictable_pages.tenant_bytes) == 0
        assert not list(reopened.policy.leaves())
    assert reopened.counters.faults.total() == 1
    assert reopened.open()
    assert get(reopened, chain("a", 4)) == [True] * 4
    assert count_bad_pages(reopened) == 0


def test_a_discarded_store_frees_its_disk_space_before_its_folder(tmp_path) -> None:
    store = store_at(tmp_path)
    put(store, chain("a", 3))
    path = store.path
    store.discard()
    assert not list(path.rglob("segment-*"))
    assert store.count_leading(chain("a", 3)) == 0
    reopened = store_at(tmp_path)
    assert reopened.path == path
    assert reopened.unavailable is None
    assert len(reopened) == 0


def test_a_temporary_store_leaves_no_folder(tmp_path) -> None:
    store = store_at(tmp_path, is_temporary=True)
    put(store, chain("a", 3))
    path = store.path
    store.discard()
    assert not path.exists()


def test_a_mark_that_was_never_written_is_written(tmp_path) -> None:
    """A crash or a full disk leaves an empty mark, next to a partial copy."""
    (tmp_path / MARK_FILE).touch()
    (tmp_path / f".{MARK_FILE}.k3v1").touch()
    store = store_at(tmp_path)
    assert store.unavailable is None
    assert put(store, chain("a", 2)) == [True] * 2
    assert (tmp_path / MARK_FILE).read_text().startswith("sglang-canopy disk store")


def test_a_mark_of_another_version_is_set_aside(tmp_path, caplog) -> None:
    (tmp_path / MARK_FILE).write_text("sglang-canopy disk store, version 99\n")
    assert store_at(tmp_path).unavailable is None
    assert "version 99" in (tmp_path / f"{MARK_FILE}.bad").read_text()
    assert caplog.text.count("cannot be used") == 1


def test_a_store_opens_after_a_first_start_on_a_full_disk(tmp_path) -> None:
    process = subprocess.run(
        [sys.executable, "-c", _FULL_AT_FIRST_PROGRAM, str(tmp_path / "store"), str(TESTS)],
        capture_output=True,
        text=True,
    )
    assert process.returncode == 0, process.stderr
    assert json.loads(process.stdout) == {"faults": {"full": 1}, "stored": [True] * 3}
    assert len(store_at(tmp_path / "store")) == 3


_FULL_AT_FIRST_PROGRAM = """
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


@pytest.mark.parametrize("method", ["close", "discard", "clear"])
def test_a_second_server_in_the_new_folder_keeps_its_pages(tmp_path, method):
    store_folder = tmp_path / "store"
    first = store_at(store_folder, pages=64)
    put(first, chain("x", 4))
    shutil.rmtree(store_folder)
    assert get(first, chain("x", 4)) == [True] * 4
    second = store_at(store_folder, pages=64)
    put(second, chain("b", 12))
    put(first, chain("z", 16))
    getattr(first, method)()
    first.sweep()
    put(second, chain("c", 4))
    assert all(get(second, chain("b", 12)))
    assert count_bad_pages(second) == 0
    shutil.copytree(store_folder, tmp_path / "copy")  # as after a kill
    copy = store_at(tmp_path / "copy", pages=64)
    assert copy.count_leading(chain("b", 12)) == 12
    assert copy.count_leading(chain("c", 4)) == 4


def test_files_are_closed_only_when_no_transfer_uses_them(tmp_path, monkeypatch):
    """Another file could get the descriptor of a closed one, and a page would be written into it."""
    files = segments.SegmentFiles(os.open(tmp_path, os.O_RDONLY), PAGE_BYTES)
    has_begun, may_continue, closed = threading.Event(), threading.Event(), []
    original_write, close = segments.os.pwritev, segments.os.close

    def write_slowly(*args):
        has_begun.set()
        assert may_continue.wait(30)
        return original_write(*args)

    monkeypatch.setattr(segments.os, "pwritev", write_slowly)
    errors: list[OSError | None] = []
    page = [memoryview(bytearray(PAGE_BYTES))]
    writer = threading.Thread(target=lambda: errors.extend(files.write([(0, page)])))
    writer.start()
    assert has_begun.wait(30)
    monkeypatch.setattr(segments.os, "close", lambda file: (closed.append(file), close(file)))
    files.close()
    assert not closed
    may_continue.set()
    writer.join(30)
    assert errors == [None]
    assert closed
    assert isinstance(files.write([(0, page)])[0], OSError)
