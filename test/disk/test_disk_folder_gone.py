"""A folder that is removed while a server uses it is not written to, nor is the one in its place."""

import os
import shutil
import threading

import pytest

from sglang_canopy.disk import segments
from support.disk_pages import PAGE, chain, get, put, store_at


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
    assert second.verify(pages=True) == 0
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
