"""The chunk store: contents, bounds, tenants, and the disk below memory."""

import tempfile

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from canopy_documents.store.chunk import Chunk, Shape
from canopy_documents.store.disk import PAGE_TOKENS, ChunkDisk
from canopy_documents.store.store import ChunkStore

SHAPE = Shape(layers=2, heads=1, kv_heads=1, head_dim=8, hidden=8, vocab=9, eps=0.1)


def make_chunk(first_id, tokens=4, dtype=torch.float32, prefix=(), tenant=None):
    kv_shape = (2, tokens, 1, 8)
    ids = tuple(range(first_id, first_id + tokens))
    k, v = torch.randn(kv_shape).to(dtype), torch.randn(kv_shape).to(dtype)
    return Chunk(ids, k, v, prefix, tenant=tenant)


CHUNK_BYTES = make_chunk(0).nbytes
PAGE_BYTES = 2 * PAGE_TOKENS * 2 * 8 * 4


def open_disk(folder, pages=1000, dtype=torch.float32, identity="m") -> ChunkDisk:
    return ChunkDisk(folder, pages * PAGE_BYTES, SHAPE, dtype, identity)


def get_chunk(store, chunk, salt=""):
    key = store.key(chunk.ids, chunk.prefix, salt)
    return store.get(key, chunk.ids, chunk.prefix)


def tier_of(store, chunk, salt=""):
    return store.tier_of(store.key(chunk.ids, chunk.prefix, salt), len(chunk))


def test_model_prefix_salt_and_tokens_are_all_in_the_key():
    a, b = ChunkStore("a", 1), ChunkStore("b", 1)
    keys = {a.key((1, 2)), b.key((1, 2)), a.key((1, 2), (3,)), a.key((1, 2), (), "t"), a.key((1,))}
    assert len(keys) == 5
    assert a.key((1,), (2,)) != a.key((), (2, 1))


def test_the_least_recent_chunk_is_dropped_and_a_large_one_evicts_nothing():
    store = ChunkStore("m", 2 * CHUNK_BYTES)
    chunks = [make_chunk(10 * i) for i in range(3)]
    store.put(chunks[0])
    store.put(chunks[1])
    get_chunk(store, chunks[0])
    store.put(chunks[2])
    store.put(make_chunk(100, tokens=50))
    assert [tier_of(store, chunk) for chunk in chunks] == ["host", None, "host"]
    assert store.dropped == 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("tokens", [1, PAGE_TOKENS - 1, PAGE_TOKENS, 2 * PAGE_TOKENS + 7])
def test_disk_returns_the_written_chunk(tmp_path, dtype, tokens):
    chunk = make_chunk(3, tokens, dtype, prefix=(9, 8))
    store = ChunkStore("m", 0, disk=open_disk(tmp_path, dtype=dtype))
    store.put(chunk)
    store.disk.finish()
    for reads_ahead in (False, True):
        if reads_ahead:
            store.disk.read_ahead(store.key(chunk.ids, chunk.prefix), tokens)
        read_chunk = get_chunk(store, chunk)
        assert (read_chunk.ids, read_chunk.prefix) == (chunk.ids, chunk.prefix)
        assert torch.equal(read_chunk.raw_k, chunk.raw_k)
        assert torch.equal(read_chunk.v, chunk.v)
    assert tier_of(store, make_chunk(3, tokens + PAGE_TOKENS, dtype, prefix=(9, 8))) is None


def test_a_chunk_evicted_to_disk_is_read_back(tmp_path):
    store = ChunkStore("m", CHUNK_BYTES, disk=open_disk(tmp_path))
    first, second = make_chunk(0), make_chunk(10)
    for chunk in (first, second):
        store.put(chunk)
        store.disk.finish()
    assert (tier_of(store, first), tier_of(store, second)) == ("disk", "host")
    assert torch.equal(get_chunk(store, first).v, first.v)
    assert (tier_of(store, first), tier_of(store, second)) == ("host", "disk")
    assert store.stats()["hits"] == {"host": 0, "disk": 1}
    store.check()


def test_a_full_disk_keeps_the_latest_chunks_whole(tmp_path):
    store = ChunkStore("m", 0, disk=open_disk(tmp_path, pages=9))
    chunks = [make_chunk(1000 * i, 3 * PAGE_TOKENS) for i in range(6)]
    for i, chunk in enumerate(chunks):
        store.put(chunk)
        store.disk.finish()
        tiers = [tier_of(store, earlier) for earlier in chunks[: i + 1]]
        assert tiers == [None] * max(0, i - 2) + ["disk"] * min(3, i + 1)
    get_chunk(store, chunks[3])  # its use is the latest
    store.put(make_chunk(9000, 3 * PAGE_TOKENS))
    store.disk.finish()
    assert [tier_of(store, chunk) for chunk in chunks[3:]] == ["disk", None, "disk"]


def test_a_damaged_page_is_never_served(tmp_path):
    store, chunk = ChunkStore("m", 0, disk=open_disk(tmp_path)), make_chunk(3, 2 * PAGE_TOKENS)
    store.put(chunk)
    store.disk.finish()
    page_bytes = chunk.v[1, -1].numpy().tobytes()
    for path in tmp_path.rglob("*"):
        if path.is_file() and page_bytes in (raw := path.read_bytes()):
            path.write_bytes(raw.replace(page_bytes, bytes(len(page_bytes))))
    assert get_chunk(store, chunk) is None
    assert tier_of(store, chunk) is None
    store.put(chunk)
    store.disk.finish()
    assert torch.equal(get_chunk(store, chunk).v, chunk.v)


def test_other_weights_share_no_disk_and_discarded_files_are_deleted(tmp_path):
    chunk = make_chunk(5)
    store = ChunkStore("m", 0, disk=open_disk(tmp_path))
    store.put(chunk)
    store.disk.finish()
    other_store = ChunkStore("other", 0, disk=open_disk(tmp_path, identity="other"))
    assert tier_of(other_store, chunk) is None
    bytes_before = sum(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file())
    store.discard()
    bytes_after = sum(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file())
    assert bytes_after < bytes_before
    reopened = ChunkStore("m", 0, disk=open_disk(tmp_path))
    assert tier_of(reopened, chunk) is None


def test_a_tenants_chunks_are_deleted_in_memory_and_on_disk(tmp_path):
    store = ChunkStore("m", 3 * CHUNK_BYTES, disk=open_disk(tmp_path))
    for tenant in ("a", "b", None):
        for first_id in (0, 10):
            store.put(make_chunk(first_id, tenant=tenant), salt=str(tenant))
    assert store.delete_tenant("a")
    assert not store.delete_tenant("a")
    assert not store.delete_tenant("nobody")
    for tenant in ("a", "b", None):
        assert (tier_of(store, make_chunk(0), str(tenant)) is None) == (tenant == "a")
    assert store.delete_tenant(None)
    assert tier_of(store, make_chunk(0), "b") == "disk"
    store.check()


TENANTS, DOCUMENTS = ("one", "two"), 5
OPERATIONS = st.sampled_from(["put", "put", "get", "delete", "delete tenant", "restart"])


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(OPERATIONS, st.sampled_from(TENANTS), st.integers(0, DOCUMENTS - 1))))
def test_two_small_tiers_separate_tenants_and_contents_through_restarts(steps):
    """A read returns the tenant's own value or nothing; after a restart, that on disk."""
    stored_chunks = {}
    with tempfile.TemporaryDirectory() as folder:
        store = ChunkStore("m", 2 * CHUNK_BYTES, disk=open_disk(folder, 3))
        for operation, tenant, number in steps:
            content_key = tenant, number
            if operation == "put":
                chunk = make_chunk(10 * number, tenant=tenant)
                if tier_of(store, chunk, tenant) is None:
                    stored_chunks[content_key] = chunk
                store.put(stored_chunks[content_key], tenant)
            elif operation == "get":
                read_chunk = get_chunk(store, make_chunk(10 * number), tenant)
                if read_chunk is not None:
                    assert torch.equal(read_chunk.v, stored_chunks[content_key].v)
            elif operation == "delete":
                store.delete(store.key(make_chunk(10 * number).ids, (), tenant))
            elif operation == "delete tenant":
                store.delete_tenant(tenant)
                assert all(
                    tier_of(store, make_chunk(10 * i), tenant) is None for i in range(DOCUMENTS)
                )
            else:
                store.disk.finish()
                store.disk.store.close()
                store = ChunkStore("m", 2 * CHUNK_BYTES, disk=open_disk(folder, 3))
            store.disk.finish()
            store.check()
        store.disk.store.close()


def test_a_disk_that_could_not_be_used_at_start_is_used_later(tmp_path):
    first_disk, chunk = open_disk(tmp_path), make_chunk(1, 40)
    later_disk = open_disk(tmp_path)
    later_disk.write("0" * 64, chunk)
    later_disk.finish()
    assert not later_disk.holds("0" * 64, 40)
    first_disk.store.close()
    later_disk.write("0" * 64, chunk)
    later_disk.finish()
    assert torch.equal(later_disk.read("0" * 64, chunk.ids, ()).v, chunk.v)
