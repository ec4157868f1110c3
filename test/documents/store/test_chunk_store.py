"""The chunk store: contents, bounds, tenants, and the disk below memory."""

import tempfile

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from canopy_documents.store.chunk import Chunk, Shape
from canopy_documents.store.disk import PAGE, ChunkDisk
from canopy_documents.store.store import ChunkStore

SHAPE = Shape(layers=2, heads=1, kv_heads=1, head_dim=8, hidden=8, vocab=9, eps=0.1)


def make(first, tokens=4, dtype=torch.float32, prefix=(), tenant=None):
    size = (2, tokens, 1, 8)
    ids = tuple(range(first, first + tokens))
    k, v = torch.randn(size).to(dtype), torch.randn(size).to(dtype)
    return Chunk(ids, k, v, prefix, tenant=tenant)


SIZE = make(0).nbytes
PAGE_BYTES = 2 * PAGE * 2 * 8 * 4


def disk(folder, pages=1000, dtype=torch.float32, identity="m") -> ChunkDisk:
    return ChunkDisk(folder, pages * PAGE_BYTES, SHAPE, dtype, identity)


def get(store, chunk, salt=""):
    key = store.key(chunk.ids, chunk.prefix, salt)
    return store.get(key, chunk.ids, chunk.prefix)


def where(store, chunk, salt=""):
    return store.where(store.key(chunk.ids, chunk.prefix, salt), len(chunk))


def test_model_prefix_salt_and_tokens_are_all_in_the_key():
    a, b = ChunkStore("a", 1), ChunkStore("b", 1)
    keys = {a.key((1, 2)), b.key((1, 2)), a.key((1, 2), (3,)), a.key((1, 2), (), "t"), a.key((1,))}
    assert len(keys) == 5
    assert a.key((1,), (2,)) != a.key((), (2, 1))


def test_the_least_recent_chunk_is_dropped_and_a_large_one_evicts_nothing():
    store = ChunkStore("m", 2 * SIZE)
    chunks = [make(10 * i) for i in range(3)]
    store.put(chunks[0])
    store.put(chunks[1])
    get(store, chunks[0])
    store.put(chunks[2])
    store.put(make(100, tokens=50))
    assert [where(store, one) for one in chunks] == ["host", None, "host"]
    assert store.dropped == 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("tokens", [1, PAGE - 1, PAGE, 2 * PAGE + 7])
def test_disk_returns_what_was_written(tmp_path, dtype, tokens):
    chunk = make(3, tokens, dtype, prefix=(9, 8))
    store = ChunkStore("m", 0, disk=disk(tmp_path, dtype=dtype))
    store.put(chunk)
    store.disk.finish()
    for ahead in (False, True):
        if ahead:
            store.disk.read_ahead(store.key(chunk.ids, chunk.prefix), tokens)
        back = get(store, chunk)
        assert (back.ids, back.prefix) == (chunk.ids, chunk.prefix)
        assert torch.equal(back.raw_k, chunk.raw_k)
        assert torch.equal(back.v, chunk.v)
    assert where(store, make(3, tokens + PAGE, dtype, prefix=(9, 8))) is None


def test_a_chunk_leaves_memory_for_disk_and_comes_back(tmp_path):
    store = ChunkStore("m", SIZE, disk=disk(tmp_path))
    first, second = make(0), make(10)
    for one in (first, second):
        store.put(one)
        store.disk.finish()
    assert (where(store, first), where(store, second)) == ("disk", "host")
    assert torch.equal(get(store, first).v, first.v)
    assert (where(store, first), where(store, second)) == ("host", "disk")
    assert store.stats()["hits"] == {"host": 0, "disk": 1}
    store.check()


def test_a_full_disk_holds_the_latest_chunks_whole(tmp_path):
    store = ChunkStore("m", 0, disk=disk(tmp_path, pages=9))
    chunks = [make(1000 * i, 3 * PAGE) for i in range(6)]
    for i, chunk in enumerate(chunks):
        store.put(chunk)
        store.disk.finish()
        held = [where(store, each) for each in chunks[: i + 1]]
        assert held == [None] * max(0, i - 2) + ["disk"] * min(3, i + 1)
    get(store, chunks[3])  # its use is the latest
    store.put(make(9000, 3 * PAGE))
    store.disk.finish()
    assert [where(store, each) for each in chunks[3:]] == ["disk", None, "disk"]


def test_a_damaged_page_is_never_served(tmp_path):
    store, chunk = ChunkStore("m", 0, disk=disk(tmp_path)), make(3, 2 * PAGE)
    store.put(chunk)
    store.disk.finish()
    written = chunk.v[1, -1].numpy().tobytes()
    for path in tmp_path.rglob("*"):
        if path.is_file() and written in (raw := path.read_bytes()):
            path.write_bytes(raw.replace(written, bytes(len(written))))
    assert get(store, chunk) is None
    assert where(store, chunk) is None
    store.put(chunk)
    store.disk.finish()
    assert torch.equal(get(store, chunk).v, chunk.v)


def test_other_weights_share_no_disk_and_old_files_go(tmp_path):
    chunk = make(5)
    store = ChunkStore("m", 0, disk=disk(tmp_path))
    store.put(chunk)
    store.disk.finish()
    other = ChunkStore("other", 0, disk=disk(tmp_path, identity="other"))
    assert where(other, chunk) is None
    before = sum(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file())
    store.discard()
    after = sum(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file())
    assert after < before
    again = ChunkStore("m", 0, disk=disk(tmp_path))
    assert where(again, chunk) is None


def test_a_tenants_chunks_are_deleted_in_memory_and_on_disk(tmp_path):
    store = ChunkStore("m", 3 * SIZE, disk=disk(tmp_path))
    for tenant in ("a", "b", None):
        for first in (0, 10):
            store.put(make(first, tenant=tenant), salt=str(tenant))
    assert store.delete_tenant("a")
    assert not store.delete_tenant("a")
    assert not store.delete_tenant("nobody")
    for tenant in ("a", "b", None):
        assert (where(store, make(0), str(tenant)) is None) == (tenant == "a")
    assert store.delete_tenant(None)
    assert where(store, make(0), "b") == "disk"
    store.check()


TENANTS, DOCUMENTS = ("one", "two"), 5
DOES = st.sampled_from(["put", "put", "get", "delete", "delete tenant", "restart"])


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(DOES, st.sampled_from(TENANTS), st.integers(0, DOCUMENTS - 1))))
def test_two_small_tiers_keep_tenants_and_contents_apart_through_restarts(steps):
    """A read returns the tenant's own value or nothing; after a restart, that on disk."""
    put = {}
    with tempfile.TemporaryDirectory() as folder:
        store = ChunkStore("m", 2 * SIZE, disk=disk(folder, 3))
        for what, tenant, which in steps:
            content_key = tenant, which
            if what == "put":
                chunk = make(10 * which, tenant=tenant)
                if where(store, chunk, tenant) is None:
                    put[content_key] = chunk
                store.put(put[content_key], tenant)
            elif what == "get":
                found = get(store, make(10 * which), tenant)
                if found is not None:
                    assert torch.equal(found.v, put[content_key].v)
            elif what == "delete":
                store.delete(store.key(make(10 * which).ids, (), tenant))
            elif what == "delete tenant":
                store.delete_tenant(tenant)
                assert all(where(store, make(10 * i), tenant) is None for i in range(DOCUMENTS))
            else:
                store.disk.finish()
                store.disk.store.close()
                store = ChunkStore("m", 2 * SIZE, disk=disk(folder, 3))
            store.disk.finish()
            store.check()
        store.disk.store.close()


def test_a_disk_that_could_not_be_used_at_start_is_used_later(tmp_path):
    first, chunk = disk(tmp_path), make(1, 40)
    later = disk(tmp_path)
    later.write("0" * 64, chunk)
    later.finish()
    assert not later.holds("0" * 64, 40)
    first.store.close()
    later.write("0" * 64, chunk)
    later.finish()
    assert torch.equal(later.read("0" * 64, chunk.ids, ()).v, chunk.v)
