"""The chunk store: contents, tiers, bounds, tenants, damage."""

import gc
import tempfile
import weakref

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from canopy_chunks.store import disk  # noqa: E402
from canopy_chunks.store.chunk import Chunk  # noqa: E402
from canopy_chunks.store.document_pins import DocumentPins  # noqa: E402
from canopy_chunks.store.store import ChunkStore  # noqa: E402
from canopy_chunks.text.documents import document_name  # noqa: E402
from sglang_canopy.errors import CanopyError  # noqa: E402


def make(first, tokens=4, dtype=torch.float32, prefix=()):
    size = (2, tokens, 1, 8)
    ids = tuple(range(first, first + tokens))
    return Chunk(ids, torch.randn(size).to(dtype), torch.randn(size).to(dtype), prefix)


SIZE = make(0).nbytes


def test_a_chunk_is_read_as_written():
    store = ChunkStore("m", {"host": 10 * SIZE})
    chunk = make(1)
    key = store.put(chunk)
    assert torch.equal(store.get(key).raw_k, chunk.raw_k)
    assert store.key(chunk.ids) == key


def test_model_prefix_salt_and_tokens_are_all_in_the_key():
    a, b = ChunkStore("a", {"host": 1}), ChunkStore("b", {"host": 1})
    keys = {a.key((1, 2)), b.key((1, 2)), a.key((1, 2), (3,)), a.key((1, 2), (), "t"), a.key((1,))}
    assert len(keys) == 5
    assert a.key((1,), (2,)) != a.key((), (2, 1))


def test_a_store_with_pins_is_freed_with_its_last_reference():
    store = ChunkStore("m", {"host": 10 * SIZE})
    pins = DocumentPins(store, share=1.0)
    chunk = make(1)
    chunk.document = document_name(chunk.ids, None)
    key = store.put(chunk)
    assert pins.pin(chunk.document, None)
    store.delete(key)
    assert (pins.chunks, pins.pinned_bytes.total()) == ({}, 0)
    freed = weakref.ref(store)
    gc.disable()
    try:
        del store, pins
        assert freed() is None
    finally:
        gc.enable()


def test_tenants_do_not_see_each_other():
    store = ChunkStore("m", {"host": 10 * SIZE})
    chunk = make(1)
    store.put(chunk, salt="one")
    assert store.get(store.key(chunk.ids, salt="two")) is None
    assert store.get(store.key(chunk.ids, salt="one")) is not None


def test_the_least_recent_chunk_is_demoted_then_dropped(tmp_path):
    room = disk.file_size(make(0))
    store = ChunkStore("m", {"device": SIZE, "host": SIZE, "disk": room}, tmp_path)
    keys = [store.put(make(10 * i), now=float(i)) for i in range(4)]
    assert [store.where(k) for k in keys] == [None, "disk", "host", "device"]
    assert store.dropped == 1
    store.check()
    assert len(list(tmp_path.rglob("*.chunk"))) == 1


def test_a_pinned_chunk_stays():
    store = ChunkStore("m", {"host": 2 * SIZE})
    kept = store.put(make(0), now=0.0)
    store.pin(kept)
    for i in range(1, 4):
        store.put(make(10 * i), now=float(i))
    assert store.where(kept) == "host"
    store.unpin(kept)
    with pytest.raises(CanopyError, match="not pinned"):
        store.unpin(kept)
    store.check()


def test_a_chunk_larger_than_every_tier_is_refused_quietly_and_evicts_nothing():
    store = ChunkStore("m", {"host": 2 * SIZE})
    small = store.put(make(0))
    store.put(make(100, tokens=50))
    assert store.where(small) == "host"
    assert store.dropped == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("tokens", [0, 1, 7])
def test_disk_returns_exactly_the_requested_rows(tmp_path, dtype, tokens):
    chunk = make(3, tokens, dtype, prefix=(9, 8))
    chunk.scores["random"] = torch.rand(tokens)
    disk.write(tmp_path / "x.chunk", chunk)
    back = disk.open_chunk(tmp_path / "x.chunk")
    assert (back.ids, back.prefix) == (chunk.ids, chunk.prefix)
    assert torch.allclose(back.scores["random"], chunk.scores["random"])
    wanted = torch.arange(0, tokens, 2)
    k, v = back.rows(1, wanted)
    assert torch.equal(k, chunk.raw_k[1, wanted])
    assert torch.equal(v, chunk.v[1, wanted])
    assert back.bytes_read == wanted.numel() * 2 * 8 * k.element_size()
    assert torch.equal(back.load().raw_k, chunk.raw_k)


def test_a_chunk_file_is_its_owners_alone(tmp_path):
    disk.write(tmp_path / "x.chunk", make(3))
    assert (tmp_path / "x.chunk").stat().st_mode & 0o777 == 0o600


def test_a_damaged_record_is_found_when_it_is_read_and_only_then(tmp_path):
    path = tmp_path / "x.chunk"
    disk.write(path, make(3))
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1
    path.write_bytes(raw)
    back = disk.open_chunk(path)
    back.rows(1, torch.tensor([0, 1, 2]))
    with pytest.raises(CanopyError, match="layer 1, token 3"):
        back.rows(1, torch.tensor([3]))


@pytest.mark.parametrize("cut", [0, 5, 100, 4100])
def test_a_cut_file_is_refused(tmp_path, cut):
    path = tmp_path / "x.chunk"
    disk.write(path, make(3))
    path.write_bytes(path.read_bytes()[:cut])
    with pytest.raises(CanopyError, match="delete it"):
        disk.open_chunk(path)


def test_a_restart_finds_whole_files_and_deletes_the_rest(tmp_path):
    store = ChunkStore("m", {"disk": 10**6}, tmp_path)
    chunk = make(5)
    key = store.put(chunk)
    (store.folder.path / "bad.chunk").write_bytes(b"half a file")
    (store.folder.path / "left.1.tmp").write_bytes(b"")
    again = ChunkStore("m", {"disk": 10**6}, tmp_path)
    assert torch.equal(again.get(key).load().v, chunk.v)
    assert [p.name for p in store.folder.path.iterdir()] == [f"{key}.chunk"]
    assert ChunkStore("other", {"disk": 10**6}, tmp_path).get(key) is None


def test_mistakes_are_explained(tmp_path):
    with pytest.raises(CanopyError, match="allowed are device, host, disk"):
        ChunkStore("m", {"tape": 1})
    with pytest.raises(CanopyError, match="needs a directory"):
        ChunkStore("m", {"disk": 1})


@settings(max_examples=30, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from(["put", "get", "pin", "unpin", "delete"]), st.integers(0, 6))
    )
)
def test_any_sequence_keeps_the_books(steps):
    store = ChunkStore("m", {"device": 2 * SIZE, "host": 3 * SIZE})
    pins = dict.fromkeys(range(7), 0)
    for now, (what, which) in enumerate(steps):
        key = store.key(make(10 * which).ids)
        if what == "put":
            store.put(make(10 * which), now=float(now))
        elif what == "get":
            store.get(key, now=float(now))
        elif what == "pin" and pins[which] == 0 and store.pin(key):
            pins[which] = 1
        elif what == "unpin" and pins[which]:
            assert store.unpin(key)
            pins[which] = 0
        elif what == "delete" and store.delete(key):
            pins[which] = 0
        store.check()


TENANTS, DOCUMENTS = ("one", "two"), 5
DOES = st.sampled_from(["put", "put", "get", "pin", "unpin", "delete", "restart"])


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(DOES, st.sampled_from(TENANTS), st.integers(0, DOCUMENTS - 1))))
def test_three_small_tiers_keep_tenants_and_contents_apart_through_restarts(steps):
    """A read returns the tenant's own latest value or nothing; after a restart, the value on disk."""
    room = disk.file_size(make(0))
    capacity = {"device": SIZE, "host": 2 * SIZE, "disk": 3 * room}
    put, pins = {}, dict.fromkeys([(t, i) for t in TENANTS for i in range(DOCUMENTS)], 0)
    with tempfile.TemporaryDirectory() as folder:
        store = ChunkStore("m", capacity, folder)
        for now, (what, tenant, which) in enumerate(steps):
            one, key = (tenant, which), store.key(make(10 * which).ids, (), tenant)
            if what == "put":
                chunk = make(10 * which)
                if store.where(key) is None:
                    put[one] = chunk
                store.put(chunk, tenant, float(now))
            elif what == "get":
                found = store.get(key, float(now))
                if found is not None:
                    kept = found.load() if isinstance(found, disk.DiskChunk) else found
                    assert torch.equal(kept.v, put[one].v)
            elif what == "pin" and not pins[one] and store.pin(key):
                pins[one] = 1
            elif what == "unpin" and pins[one] and store.where(key):
                store.unpin(key)
                pins[one] = 0
            elif what == "delete" and store.delete(key):
                pins[one] = 0
            elif what == "restart":
                on_disk = {k for k in _keys(store) if store.where(k) == "disk"}
                store = ChunkStore("m", capacity, folder)
                pins = dict.fromkeys(pins, 0)
                assert set(_keys(store)) == on_disk
            store.check()
            assert {k for k in pins if pins[k]} <= {k for k in pins if store.where(_key(store, k))}


def _keys(store):
    return [key for key, *_ in store.listing()]


def _key(store, one):
    tenant, which = one
    return store.key(make(10 * which).ids, (), tenant)
