"""The disk under the chunk store: many files, files that change, and a folder that takes no more."""

import errno
import os
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from test_chunk_store import SIZE, make  # noqa: E402

from canopy_chunks.store import disk  # noqa: E402
from canopy_chunks.store.store import ChunkStore  # noqa: E402
from sglang_canopy.errors import CanopyError  # noqa: E402


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_only_the_files_that_were_read_last_are_open(tmp_path):
    """A process may have a thousand files open: more chunks than that took away its sockets."""
    before = open_files()
    store = ChunkStore("m", {"disk": 1 << 24}, tmp_path)
    keys = [store.put(make(10 * i)) for i in range(300)]
    assert open_files() <= before + 2
    for _ in range(2):
        for key in keys:
            assert len(store.look(key).load()) == 4
        assert before < open_files() <= before + disk.MAX_OPEN
    for key in keys:
        store.delete(key)
    assert open_files() == before, "what is deleted takes no room on the disk"
    assert not list(tmp_path.rglob("*.chunk"))


def test_a_file_that_is_cut_while_the_server_runs_is_damaged(tmp_path):
    path = tmp_path / "x.chunk"
    disk.write(path, make(3, tokens=5000))
    chunk = disk.open_chunk(path)
    for size in (path.stat().st_size - 1, 100_000, 0):
        os.truncate(path, size)
        with pytest.raises(CanopyError, match="delete it"):
            chunk.rows(1, torch.tensor([4999]))
    assert len(chunk.rows(1, torch.arange(0))[0]) == 0


@pytest.fixture
def read_only(monkeypatch):
    """Make writes fail, as on a file system after a disk error."""

    def refuse(path, *_args, **_more):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))

    def begin():
        monkeypatch.setattr(Path, "unlink", refuse)
        monkeypatch.setattr(disk, "write", refuse)

    return begin


def test_a_folder_that_has_become_read_only_stops_nothing(tmp_path, read_only):
    store = ChunkStore("m", {"host": 2 * SIZE, "disk": 1 << 20}, tmp_path)
    keys = [store.put(make(10 * i), now=float(i)) for i in range(4)]
    assert store.where(keys[0]) == "disk"
    read_only()
    assert store.delete(keys[0])
    keys += [store.put(make(10 * i), now=float(i)) for i in range(4, 8)]
    assert [store.where(key) for key in keys[-2:]] == ["host", "host"]
    store.check()


def test_anything_but_files_is_skipped_at_start(tmp_path):
    store = ChunkStore("m", {"disk": 1 << 20}, tmp_path)
    key = store.put(make(3))
    (store.folder.path / "folder.chunk").mkdir()
    (store.folder.path / "folder.tmp").mkdir()
    (store.folder.path / "gone.chunk").symlink_to(tmp_path / "nowhere")
    again = ChunkStore("m", {"disk": 1 << 20}, tmp_path)
    assert [one for one, *_ in again.listing()] == [key]


def test_a_directory_that_cannot_be_is_explained(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CanopyError, match=r"directory .*file.* cannot be used"):
        ChunkStore("m", {"disk": 1 << 20}, tmp_path / "file" / "folder")


def test_a_full_disk_keeps_the_newest_chunks_that_fit(tmp_path, monkeypatch):
    """Less room than ``disk_mb``: what cannot be written is not stored, and old files make room."""
    store = ChunkStore("m", {"disk": 1 << 20}, tmp_path)
    real, room = disk.write, 3

    def write(path, chunk):
        if len(list(tmp_path.rglob("*.chunk"))) == room:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(path, chunk)

    monkeypatch.setattr(disk, "write", write)
    keys = [store.put(make(10 * i), now=float(i)) for i in range(4)]
    assert [store.where(key) for key in keys] == ["disk"] * 3 + [None]
    again = store.put(make(30), now=4.0)
    assert [store.where(key) for key in keys] == [None, "disk", "disk", "disk"]
    assert len(store.look(again).load()) == 4
    assert store.dropped == 2
    store.check()
