"""Chunks are encoded a piece at a time, within bounds; a batch is packed without touching the original."""

import pytest
import torch

from canopy_documents.fuse import background_encoder
from canopy_documents.fuse.background_encoder import BackgroundEncoder
from canopy_documents.server.batch import count_logit_rows, pack_rows
from canopy_documents.store.store import ChunkStore
from support.document_steps import batch_of
from support.fused_prompts import encode


@pytest.fixture
def store(llama) -> ChunkStore:
    return ChunkStore("model", 1 << 24)


def run_until_idle(encoder: BackgroundEncoder) -> int:
    encoded_tokens = 0
    while encoder.busy:
        encoded_tokens += encoder.step()
    return encoded_tokens


def test_pieces_give_the_chunk_of_one_encoding_and_their_prefix_is_encoded_once(llama, store, ids):
    encoder = BackgroundEncoder(llama, store)
    prefix, document = ids[:10].tolist(), ids[10:170].tolist()
    encoder.enqueue(document, prefix, "")
    encoder.enqueue(ids[170:230].tolist(), prefix, "")
    assert run_until_idle(encoder) == 10 + 160 + 60
    for document_ids in (document, ids[170:230].tolist()):
        stored = store.chunks.get(store.key(document_ids, prefix))
        expected = encode(llama, document_ids, prefix)
        torch.testing.assert_close(stored.raw_k, expected.raw_k, atol=2e-5, rtol=1e-4)
        torch.testing.assert_close(stored.v, expected.v, atol=2e-5, rtol=1e-4)


def test_requesting_a_waiting_or_stored_chunk_again_has_no_effect(llama, store, ids) -> None:
    encoder = BackgroundEncoder(llama, store)
    for _ in range(3):
        encoder.enqueue(ids[:50].tolist(), (), "")
    assert len(encoder.queue) == 1
    run_until_idle(encoder)
    encoder.enqueue(ids[:50].tolist(), (), "")
    assert not encoder.busy
    encoder.enqueue(ids[:50].tolist(), (), "tenant")
    assert encoder.busy


def test_the_queue_is_bounded_and_counts_dropped_chunks(llama, store, ids, monkeypatch) -> None:
    max_waiting_tokens = 2 * background_encoder.MIN_QUEUED_TOKENS - 1
    monkeypatch.setattr(background_encoder, "MAX_WAITING_TOKENS", max_waiting_tokens)
    encoder = BackgroundEncoder(llama, store)
    encoder.enqueue(ids[:60].tolist(), (), "")
    encoder.enqueue(ids[60:120].tolist(), (), "")
    assert len(encoder.queue) == 1
    assert encoder.queue.dropped_chunks == 1
    assert encoder.queue.tokens == 60


def test_a_deleted_chunk_in_progress_is_not_encoded(llama, store, ids) -> None:
    encoder = BackgroundEncoder(llama, store)
    encoder.enqueue(ids[:100].tolist(), (), "")
    encoder.step()
    assert encoder.forget(None)
    assert not encoder.busy
    assert len(store) == 0


def test_a_packed_batch_has_matching_rows_slots_and_lengths() -> None:
    batch = batch_of([(10, 30), (0, 5), (49, 50)])
    chosen_positions = [torch.tensor([12, 13, 29]), torch.arange(5), torch.tensor([49])]
    packed, plan = pack_rows(batch, batch.table, chosen_positions)
    assert packed.extend_lens == [3, 5, 1]
    assert packed.extend_num_tokens == 9
    assert packed.prefix_lens == [27, 0, 49]
    assert packed.input_ids.tolist() == [2, 3, 19, 20, 21, 22, 23, 24, 25]
    assert packed.out_cache_loc.tolist() == [19, 20, 36, 107, 108, 109, 110, 111, 256]
    assert plan.positions.tolist() == [12, 13, 29, 0, 1, 2, 3, 4, 49]
    assert plan.rows.query_starts.tolist() == [0, 3, 8, 9]
    assert plan.rows.key_starts.tolist() == [0, 30, 35, 85]
    assert batch.extend_lens == [20, 5, 1]
    assert packed.seq_lens is batch.seq_lens


@pytest.mark.parametrize(
    "chosen_positions",
    [
        [torch.tensor([9, 12])],  # before the prefix
        [torch.tensor([12, 30])],  # past the window
        [torch.tensor([13, 12])],  # out of order
        [torch.tensor([], dtype=torch.long)],  # nothing
    ],
)
def test_rows_that_break_an_invariant_are_never_run(chosen_positions) -> None:
    batch = batch_of([(10, 30)])
    with pytest.raises(AssertionError):
        pack_rows(batch, batch.table, chosen_positions)


def test_slots_that_are_not_the_rows_are_never_written() -> None:
    batch = batch_of([(10, 30)])
    batch.out_cache_loc = batch.out_cache_loc.flip(0)
    with pytest.raises(AssertionError):
        pack_rows(batch, batch.table, [torch.tensor([12, 29])])


def test_tenants_take_turns_in_the_queue(llama, store, ids) -> None:
    encoder = BackgroundEncoder(llama, store)
    for tenant in ("a", "a", "a", "b", "b"):
        queued = len(encoder.queue)
        encoder.enqueue(ids[queued : queued + 20].tolist(), (), f"salt {tenant}", tenant)
    run_until_idle(encoder)
    assert [chunk.tenant for chunk in store.chunks.values()] == ["a", "b", "a", "b", "a"]


def test_prompt_logprobs_in_a_batch_with_a_fused_request_are_complete() -> None:
    batch = batch_of([(10, 30), (0, 8)])
    batch.return_logprob = True
    batch.extend_logprob_start_lens = [20, 3]  # the second request needs positions 3 to 7
    packed, _ = pack_rows(batch, batch.table, [torch.tensor([12, 29]), torch.arange(8)])
    assert packed.extend_logprob_start_lens == [2, 3]
    assert count_logit_rows(batch) == [1, 5]
