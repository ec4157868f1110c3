"""Chunks on disk are read while requests wait, within a bound, and are freed with the last of these requests."""

import ctypes
import gc
import mmap
import os
import threading
import time

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from canopy_chunks.fuse.encode import encode  # noqa: E402
from canopy_chunks.server.request import ChunkRequest  # noqa: E402
from canopy_chunks.store import disk, read_ahead  # noqa: E402
from canopy_chunks.store.chunk import Chunk  # noqa: E402
from canopy_chunks.store.read_ahead import ReadAhead, read_layers_ahead  # noqa: E402
from canopy_chunks.store.suffix import ChunkSuffix  # noqa: E402
from sglang_canopy.errors import CanopyError  # noqa: E402

LENGTH = 30


@pytest.fixture(scope="module")
def files(llama, ids, tmp_path_factory):
    """Three chunks, in memory and as files."""
    folder, both = tmp_path_factory.mktemp("chunks"), []
    for i in range(3):
        chunk = encode(llama, ids[i * LENGTH : (i + 1) * LENGTH].tolist())
        disk.write(folder / f"{i}.chunk", chunk)
        both.append((chunk, disk.open_chunk(folder / f"{i}.chunk")))
    return both


def request() -> ChunkRequest:
    return ChunkRequest((), (), (), (), "", None, 0.15, "default", 0.0)


class Slow:
    """A chunk on disk whose read blocks until it is released."""

    nbytes = 10

    def __init__(self) -> None:
        self.begun, self.go = threading.Event(), threading.Event()

    def load(self):
        self.begun.set()
        self.go.wait()
        return self


@pytest.fixture
def busy():
    """A reader whose thread is busy with one slow chunk, of a request that stays."""
    reader, slow, stays = ReadAhead(1 << 30), Slow(), request()
    reader.request("slow", slow, stays)
    slow.begun.wait()
    yield reader, slow, stays
    slow.go.set()


def test_a_chunk_is_read_while_its_request_waits(files) -> None:
    reader, waits = ReadAhead(1 << 30), request()
    chunk, on_disk = files[0]
    reader.request("a", on_disk, waits)
    reader.request("a", on_disk, waits)
    reader.pending["a"].future.result()
    got = reader.take("a")
    assert torch.equal(got.raw_k, chunk.raw_k)
    assert torch.equal(got.v, chunk.v)
    assert reader.stats()["used_bytes"] == on_disk.nbytes
    reader.release(waits)
    expected = {"asked": 1, "taken": 1, "left_out": 0, "used_bytes": 0}
    assert reader.stats() == expected
    assert reader.take("a") is None


def test_a_chunk_stays_as_long_as_one_request_waits_for_it(files) -> None:
    reader, one, other = ReadAhead(1 << 30), request(), request()
    for waits in (one, other):
        reader.request("a", files[0][1], waits)
    reader.release(one)
    assert reader.take("a") is not None
    reader.release(other)
    assert not reader.pending


def test_chunks_that_do_not_fit_are_read_from_the_file(files) -> None:
    waits = request()
    reader = ReadAhead(files[0][1].nbytes * 2)
    for i, (_, on_disk) in enumerate(files):
        reader.request(str(i), on_disk, waits)
    assert sorted(reader.pending) == ["0", "1"]
    assert reader.take("2") is None
    assert reader.stats()["left_out"] == 1
    reader.release(waits)
    reader.request("2", files[2][1], waits)
    assert reader.pending["2"].future.result() is not None


def test_an_aborted_requests_chunks_are_not_read(files, busy) -> None:
    reader, slow, _ = busy
    aborted = request()
    reader.request("a", files[0][1], aborted)
    future = reader.pending["a"].future
    del aborted
    gc.collect()
    slow.go.set()
    assert future.result() is None
    reader.drop_unneeded()
    assert list(reader.pending) == ["slow"]
    assert reader.used_bytes == slow.nbytes


def test_an_idle_server_holds_nothing(files) -> None:
    reader, waits = ReadAhead(1 << 30), request()
    for i, (_, on_disk) in enumerate(files):
        reader.request(str(i), on_disk, waits)
    reader.clear()
    assert reader.stats()["used_bytes"] == 0
    assert not reader.pending


def test_an_unstarted_chunk_is_read_from_the_file(files, busy) -> None:
    reader, slow, stays = busy
    reader.request("a", files[0][1], stays)
    assert reader.take("a") is None
    slow.go.set()
    assert reader.take("slow") is slow  # take waits for a running read
    reader.release(stays)
    assert reader.used_bytes == 0


@pytest.fixture
def damaged(files, tmp_path):
    path = tmp_path / "bad.chunk"
    disk.write(path, files[0][0])
    whole = bytearray(path.read_bytes())
    whole[-5] ^= 1
    path.write_bytes(whole)
    return disk.open_chunk(path)


def test_a_damaged_file_is_not_used(damaged) -> None:
    reader, waits = ReadAhead(1 << 30), request()
    reader.request("a", damaged, waits)
    with pytest.raises(CanopyError):
        reader.pending["a"].future.result()
    assert reader.take("a") is None


def test_layers_are_read_correctly_from_any_position(llama, files) -> None:
    tokens = torch.tensor([0, 3, 17])
    chunks = [files[0][0], files[1][1], ChunkSuffix(files[2][1], 5), ChunkSuffix(files[0][0], 2)]
    want = [files[0][0], files[1][0], ChunkSuffix(files[2][0], 5), ChunkSuffix(files[0][0], 2)]
    layers = list(read_layers_ahead([(c, tokens) for c in chunks], llama.shape.layers))
    assert len(layers) == llama.shape.layers
    for i, rows in enumerate(layers):
        for got, chunk in zip(rows, want, strict=True):
            for mine, theirs in zip(got, chunk.rows(i, tokens)):
                assert torch.equal(mine, theirs)


def test_a_damaged_file_stops_the_layers(llama, files, damaged) -> None:
    parts = [(files[1][0], torch.arange(3)), (damaged, torch.arange(LENGTH))]
    with pytest.raises(CanopyError, match="damaged"):
        list(read_layers_ahead(parts, llama.shape.layers))


def resident_pages(mapped) -> list[int]:
    """The pages of a mapped file that are in memory."""
    libc = ctypes.CDLL(None, use_errno=True)
    view = np.frombuffer(mapped, np.uint8)
    count = -(-len(view) // mmap.PAGESIZE)
    held = (ctypes.c_ubyte * count)()
    address = ctypes.c_void_p(view.ctypes.data)
    assert libc.mincore(address, ctypes.c_size_t(len(view)), held) == 0
    return [i for i, one in enumerate(held) if one & 1]


@pytest.fixture
def cold(tmp_path):
    """A file with one record per page, and no page in memory."""
    tokens, dim = 256, mmap.PAGESIZE // 4 // 2
    k, v = (torch.randn(2, tokens, 1, dim) for _ in range(2))
    path = tmp_path / "cold.chunk"
    disk.write(path, Chunk(tuple(range(tokens)), k, v))
    found = disk.open_chunk(path)
    with path.open("rb") as f:
        os.fsync(f.fileno())
        os.posix_fadvise(f.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        mapped = mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ)
    if len(resident_pages(mapped)) > 64:
        pytest.skip("this file system keeps files in memory")
    return found, k, v, mapped


def test_scattered_records_are_read_without_their_gaps(cold) -> None:
    chunk, k, v, mapped = cold
    before = len(resident_pages(mapped))
    wanted = torch.arange(0, 256, 16)
    chunk.expect(1, wanted)
    got = chunk.rows(1, wanted)
    assert torch.equal(got[0], k[1, wanted])
    assert torch.equal(got[1], v[1, wanted])
    brought = len(resident_pages(mapped)) - before
    assert len(wanted) <= brought <= 2 * len(wanted)  # a record may span two pages


def test_expected_records_are_read_ahead(cold) -> None:
    chunk, _, _, mapped = cold
    wanted = torch.arange(100, 140)
    chunk.expect(0, wanted)
    deadline = time.monotonic() + 20
    while len(resident_pages(mapped)) < len(wanted) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert len(resident_pages(mapped)) >= len(wanted)
    assert chunk.bytes_read == 0


def test_dense_reads_use_the_kernels_read_ahead(cold) -> None:
    chunk, _, _, mapped = cold
    before = len(resident_pages(mapped))
    chunk.expect(0, torch.arange(0, 256, 2))
    assert len(resident_pages(mapped)) == before, "nothing is asked for"
    chunk.rows(0, torch.arange(0, 256, 2))
    assert len(resident_pages(mapped)) >= before + 255, "what lies between is read with it"


@pytest.mark.parametrize("skip", [0, 7])
def test_several_layers_are_requested_at_once(files, monkeypatch, skip) -> None:
    monkeypatch.setattr(read_ahead, "LAYERS_AHEAD", 2)
    chunk, asked = files[0][1], []
    real = type(chunk).expect
    monkeypatch.setattr(
        type(chunk), "expect", lambda c, n, t: asked.append((n, t.tolist())) or real(c, n, t)
    )
    part = ChunkSuffix(chunk, skip) if skip else chunk
    layers = read_layers_ahead([(part, torch.tensor([1, 4]))], chunk.layers)
    next(layers)
    assert [n for n, _ in asked] == [0, 1, 2, 3]
    assert all(tokens == [1 + skip, 4 + skip] for _, tokens in asked)
    list(layers)
    assert [n for n, _ in asked] == list(range(chunk.layers)), "each once, and none beyond the last"
