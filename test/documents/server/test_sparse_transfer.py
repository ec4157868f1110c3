"""Scores that are stored with a chunk choose first, and only the other tokens' KV is read or travels."""

import gc
import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from canopy_documents.server.library import score_chunk
from canopy_documents.store.chunk import Chunk, Shape
from canopy_documents.store.host_memory import HostMemory
from canopy_documents.store.store import ChunkStore
from canopy_kernel import rope_scatter
from support.document_engine import LENGTH
from support.document_steps import kernels_on, moved, run, same_kv, served, step_of
from support.separate_device import SeparateDevice, inside

SHAPE = Shape(layers=2, heads=4, kv_heads=2, head_dim=4, hidden=8, vocab=10, eps=1e-6)
TOKEN_BYTES = 2 * 2 * 2 * 4 * 4


@pytest.fixture
def scored(chunks):
    for chunk in chunks:  # as the encoder does before it stores one
        score_chunk("frequency", chunk)
    return chunks


def token_bytes(model) -> int:
    return model.shape.kv_elements_per_token * model.dtype.itemsize


@pytest.mark.parametrize("ratio", [0.15, 0.4])
@pytest.mark.parametrize("selector", ["question", "frequency"])
def test_bytes_copied_from_host_memory_are_counted(
    llama, ids, scored, monkeypatch, ratio, selector
) -> None:
    device = SeparateDevice()
    kernels_on(monkeypatch)
    travelled, launch = [], rope_scatter.LayersScatter.run

    def scatter(work, *layers):  # from the host's memory into the pool
        travelled.append(work.source.numel() * 2 * work.keys[0][:, 0].nbytes)
        launch(work, *layers)

    monkeypatch.setattr(rope_scatter.LayersScatter, "run", scatter)
    options = {"ratio": ratio, "selector": selector}
    engine = served(moved(llama, device), monkeypatch, device.put, **options)
    with device:
        _, batch, row = step_of(engine, ids, scored, device.put)
        engine.library.store.check()
        before = device.copied["to device"]
        (rows,) = run(engine, batch, monkeypatch)
    assert engine.counts["fallbacks"] == 0
    reused = torch.ones(len(row), dtype=torch.bool)
    reused[inside(rows)] = False
    tokens = int(reused.sum()) if selector == "frequency" else 3 * LENGTH
    assert sum(travelled) == tokens * token_bytes(llama)
    assert device.copied["to device"] - before < token_bytes(llama) * LENGTH  # indices alone
    plain = served(llama, monkeypatch, lambda x: x, ratio=0.0)
    _, batch, _ = step_of(plain, ids, scored, lambda x: x)
    run(plain, batch, monkeypatch)  # the chunks' own KV, all of it
    same_kv(engine, plain, row[reused])


def chunk_of(number: int, tokens: int) -> Chunk:
    size = (SHAPE.layers, tokens, SHAPE.kv_heads, SHAPE.head_dim)
    return Chunk(
        (number,) * tokens, torch.full(size, float(number)), torch.full(size, -number * 1.0)
    )


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(0, 5)), max_size=30))
@settings(deadline=None, max_examples=50)
def test_slots_of_the_hosts_memory_are_never_shared(steps) -> None:
    memory, held = HostMemory(SHAPE, torch.float32, 20 * TOKEN_BYTES), {}
    for number, (tokens, drop) in enumerate(steps):
        held.pop(drop, None)
        used = sum(map(len, held.values()))
        slots = memory.hold(chunk_of(number, tokens))
        assert (slots is not None) == (used + tokens <= 20)
        if slots is not None:
            held[number] = slots
        del slots
        taken = [slot for one in held.values() for slot in one.slots.tolist()]
        assert len(set(taken)) == len(taken) == 20 - memory.free_slots
        assert all((one.raw_k == key).all() for key, one in held.items())
        assert all((one.v == -key).all() for key, one in held.items())


def test_a_chunk_that_is_deleted_while_a_plan_holds_it_stays_whole() -> None:
    memory = HostMemory(SHAPE, torch.float32, 10 * TOKEN_BYTES)
    store = ChunkStore("m", 10 * TOKEN_BYTES, memory)
    key = store.put(chunk_of(1, 6))
    held = store.chunks.get(key)
    assert store.delete(key)
    other = store.put(chunk_of(2, 6))  # the tier has room, the memory not yet: a tensor of its own
    assert (store.chunks.get(other).raw_k == 2).all()
    assert (held.raw_k == 1).all()
    assert (held.rows(1, torch.tensor([0, 5]))[1] == -1).all()
    del held
    gc.collect()
    assert memory.free_slots == 10
    store.check()


def test_a_chunk_freed_during_allocation_blocks_no_request() -> None:
    """The garbage collector runs wherever memory is taken, and gives back slots in the same thread."""
    memory = HostMemory(SHAPE, torch.float32, 10 * TOKEN_BYTES)
    going, allocations = [memory.hold(chunk_of(1, 5))], []

    class Free(list):
        def __iter__(self):
            going.clear()
            return list.__iter__(self)

    memory._free = Free(memory._free)
    thread = threading.Thread(
        target=lambda: allocations.append(memory.hold(chunk_of(2, 3))), daemon=True
    )
    thread.start()
    thread.join(20)
    assert [len(one) for one in allocations] == [3]
    assert memory.free_slots == 7
