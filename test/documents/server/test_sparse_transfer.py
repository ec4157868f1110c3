"""Scores that are stored with a chunk choose first, and only the other tokens' KV is read and transferred."""

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
from support.document_engine import DOCUMENT_TOKENS
from support.document_steps import check_kv, move_model, pool_engine, run_step, set_up, use_torch
from support.separate_device import SeparateDevice, unwrap

SHAPE = Shape(layers=2, heads=4, kv_heads=2, head_dim=4, hidden=8, vocab=10, eps=1e-6)
TOKEN_BYTES = 2 * 2 * 2 * 4 * 4


@pytest.fixture
def scored_chunks(chunks):
    for chunk in chunks:  # as the encoder does before it stores one
        score_chunk("frequency", chunk)
    return chunks


def token_bytes(model) -> int:
    return model.shape.kv_elements_per_token * model.dtype.itemsize


@pytest.mark.parametrize("ratio", [0.15, 0.4])
@pytest.mark.parametrize("selector", ["question", "frequency"])
def test_only_reused_tokens_are_copied_if_stored_scores_choose_them(
    llama, ids, scored_chunks, monkeypatch, ratio, selector
) -> None:
    device = SeparateDevice()
    use_torch(monkeypatch)
    transferred, original_run = [], rope_scatter.LayersScatter.run

    def record_and_run(layers_scatter, *layers):  # from the host's memory into the pool
        transferred.append(layers_scatter.source.numel() * 2 * layers_scatter.keys[0][:, 0].nbytes)
        original_run(layers_scatter, *layers)

    monkeypatch.setattr(rope_scatter.LayersScatter, "run", record_and_run)
    options = {"ratio": ratio, "selector": selector}
    engine = pool_engine(move_model(llama, device), monkeypatch, device.put, **options)
    with device:
        _, batch, row = set_up(engine, ids, scored_chunks, device.put)
        engine.library.store.check()
        copied_before = device.copied_bytes["to device"]
        (rows,) = run_step(engine, batch, monkeypatch)
    assert engine.counts["fallbacks"] == 0
    reused = torch.ones(len(row), dtype=torch.bool)
    reused[unwrap(rows)] = False
    transferred_tokens = int(reused.sum()) if selector == "frequency" else 3 * DOCUMENT_TOKENS
    assert sum(transferred) == transferred_tokens * token_bytes(llama)
    assert device.copied_bytes["to device"] - copied_before < token_bytes(llama) * DOCUMENT_TOKENS
    cpu_engine = pool_engine(llama, monkeypatch, lambda x: x, ratio=0.0)
    _, batch, _ = set_up(cpu_engine, ids, scored_chunks, lambda x: x)
    run_step(cpu_engine, batch, monkeypatch)  # the chunks' own KV, all of it
    check_kv(engine, cpu_engine, row[reused])


def chunk_of(value: int, tokens: int) -> Chunk:
    size = (SHAPE.layers, tokens, SHAPE.kv_heads, SHAPE.head_dim)
    return Chunk((value,) * tokens, torch.full(size, float(value)), torch.full(size, -value * 1.0))


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(0, 5)), max_size=30))
@settings(deadline=None, max_examples=50)
def test_slots_of_the_hosts_memory_are_never_shared(steps) -> None:
    memory, chunks = HostMemory(SHAPE, torch.float32, 20 * TOKEN_BYTES), {}
    for number, (tokens, dropped_number) in enumerate(steps):
        chunks.pop(dropped_number, None)
        used_tokens = sum(map(len, chunks.values()))
        host_chunk = memory.copy_in(chunk_of(number, tokens))
        assert (host_chunk is not None) == (used_tokens + tokens <= 20)
        if host_chunk is not None:
            chunks[number] = host_chunk
        del host_chunk
        used_slots = [slot for chunk in chunks.values() for slot in chunk.slots.tolist()]
        assert len(set(used_slots)) == len(used_slots) == 20 - memory.free_slots
        assert all((chunk.raw_k == value).all() for value, chunk in chunks.items())
        assert all((chunk.v == -value).all() for value, chunk in chunks.items())


def test_a_chunk_that_is_deleted_while_a_plan_uses_it_keeps_its_kv() -> None:
    memory = HostMemory(SHAPE, torch.float32, 10 * TOKEN_BYTES)
    store = ChunkStore("m", 10 * TOKEN_BYTES, memory)
    key = store.put(chunk_of(1, 6))
    chunk = store.chunks.get(key)
    assert store.delete(key)
    other_key = store.put(chunk_of(2, 6))  # the memory has no space yet: a separate tensor
    assert (store.chunks.get(other_key).raw_k == 2).all()
    assert (chunk.raw_k == 1).all()
    assert (chunk.rows(1, torch.tensor([0, 5]))[1] == -1).all()
    del chunk
    gc.collect()
    assert memory.free_slots == 10
    store.check()


def test_a_chunk_freed_during_allocation_blocks_no_request() -> None:
    """The garbage collector may run during an allocation, and frees slots in the same thread."""
    memory = HostMemory(SHAPE, torch.float32, 10 * TOKEN_BYTES)
    freed_chunks, allocations = [memory.copy_in(chunk_of(1, 5))], []

    class FreeingList(list):
        def __iter__(self):
            freed_chunks.clear()
            return list.__iter__(self)

    memory._free = FreeingList(memory._free)
    thread = threading.Thread(
        target=lambda: allocations.append(memory.copy_in(chunk_of(2, 3))), daemon=True
    )
    thread.start()
    thread.join(20)
    assert [len(chunk) for chunk in allocations] == [3]
    assert memory.free_slots == 7
