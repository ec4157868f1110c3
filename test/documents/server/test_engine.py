"""A scheduler's document engine: the heads of documents, encoding in idle time, and its bounds."""

import time
from types import SimpleNamespace

import pytest
import torch

from canopy_documents.fuse import background_encoder
from canopy_documents.fuse.cache import dense_cache
from canopy_documents.fuse.fusion import fused_prefill
from canopy_documents.fuse.rows import MAX_STOPS, MIN_RUN_ROWS, prefill
from canopy_documents.fuse.selectors import make_selector
from canopy_documents.server import engine as engine_module
from canopy_documents.server import library, scheduler
from canopy_documents.server import request as request_module
from canopy_documents.server.engine import READING_BURST, READINGS_PER_S, DocumentEngine
from canopy_documents.server.options import LEARN_PREFIX_TOKENS
from canopy_documents.store.chunk import FusedPrompt
from canopy_documents.text.variants import Heads
from support.document_engine import (
    DOCUMENT_END,
    DOCUMENT_TOKENS,
    SYSTEM_TOKENS,
    chunk_tiers,
    learn,
    prompt,
    queue_req,
    register_head,
    request,
    scheduler_of,
)
from support.fused_prompts import encode


def test_only_a_first_document_is_stored_from_a_plain_prefill(make_engine, llama, ids, monkeypatch):
    engine = make_engine()
    head_tokens = len(engine.stand_ins[0])
    system, document = ids[:SYSTEM_TOKENS].tolist(), ids[SYSTEM_TOKENS:DOCUMENT_END].tolist()
    prompt_ids = system + [7] * head_tokens + document
    start = SYSTEM_TOKENS + head_tokens  # as many tokens as the prefix that it is encoded behind
    req = request([*prompt_ids, 1], [SYSTEM_TOKENS, start, start, start + DOCUMENT_TOKENS])
    document_request = engine.new_request(req)
    register_head(engine, document_request)
    captured_starts = []

    def capture(model, cache, document, start, prefix):
        captured_starts.append(start)
        return encode(llama, document, prefix)

    monkeypatch.setattr(library, "capture", capture)
    monkeypatch.setattr(engine_module.model_view, "row_cache", lambda *_: None)
    engine.encode_missing(req, document_request, torch.arange(len(prompt_ids)))
    assert captured_starts == [SYSTEM_TOKENS]
    assert len(engine.library.encoder.queue) == 1
    assert chunk_tiers(engine, req) == ["host", None]


@pytest.mark.parametrize("remaining_ids", [[0], None])
def test_a_prompt_that_was_replaced_or_cut_is_not_read(make_engine, ids, remaining_ids) -> None:
    engine = make_engine()
    prompt_ids, bounds = prompt(ids)
    req = request(prompt_ids, bounds)
    document_request = engine.new_request(req)
    req.origin_input_ids = remaining_ids or prompt_ids[: bounds[-1] - 5]
    assert not engine.may_fuse(req, document_request)
    assert document_request.reason == "aborted or truncated"
    engine.encode_missing(req, document_request, torch.arange(1))
    assert not engine.library.encoder.busy


def test_a_waiting_requests_documents_on_disk_are_read(make_engine, ids, tmp_path) -> None:
    engine = make_engine(disk_mb=64, directory=str(tmp_path))
    req, disk = request(*prompt(ids)), engine.library.store.disk
    learn(engine, req)
    disk.finish()
    for key in list(engine.library.store.chunks):
        engine.library.store.delete(key)
    document_request = engine.new_request(req)
    assert chunk_tiers(engine, req) == ["disk"] * 3
    engine.library.read_ahead(document_request)
    assert set(disk._reads) == {keys[0] for keys in document_request.keys}
    loaded = engine.library.load(document_request, req.origin_input_ids)
    assert [document.tier for document in loaded] == ["disk"] * 3
    assert not disk._reads
    assert chunk_tiers(engine, req) == ["host"] * 3


def test_a_prefill_earns_encoding_that_a_later_forward_runs(make_engine, ids) -> None:
    engine = make_engine(learn_share=0.1, stand_ins=False)
    req = request(*prompt(ids))
    document_request = engine.new_request(req)
    document_request.is_fused = True
    engine.encode_missing(req, document_request, torch.arange(len(req.origin_input_ids)))
    engine.library.earn_encoding(630)  # one piece is 64 tokens
    engine.work_before_batch(10_000)
    assert engine.library.encoder.encoded_tokens == 0
    engine.library.earn_encoding(10)
    engine.work_before_batch(64)
    assert engine.library.encoder.encoded_tokens == DOCUMENT_END
    assert engine.library.encode_credit == 64 - DOCUMENT_END
    while engine.library.encoder.busy:
        engine.library.encode_piece()
    engine.library.earn_encoding(640)
    assert engine.library.encode_credit == 0  # nothing waits: no credit is saved


def test_long_prompts_do_not_save_up_encoding_that_short_prompts_then_wait_for(make_engine) -> None:
    engine, delayed_batches = make_engine(learn_share=0.5, stand_ins=False), 0
    for number in range(30):
        engine.library.encoder.enqueue(range(300), (), f"{number}", None)
        engine.library.earn_encoding(1024)
        engine.work_before_batch(1)
    assert engine.library.encode_credit <= 0.5 * 1024
    for number in range(30, 50):
        engine.library.encoder.enqueue(range(300), (), f"{number}", None)
        encoded_before = engine.library.encoder.encoded_tokens
        engine.work_before_batch(1)
        delayed_batches += engine.library.encoder.encoded_tokens > encoded_before
    assert 0 < delayed_batches <= 8


def test_a_long_prompt_waits_for_few_of_the_pieces_that_were_earned(make_engine, ids) -> None:
    engine = make_engine(learn_share=0.1, stand_ins=False)
    engine.checker.limits.interval = 1
    learn(engine, request(*prompt(ids, (2,))))
    req = request(*prompt(ids, (2,)))
    document_request = engine.new_request(req)
    document_request.is_fused = True
    engine.offer_check(req, document_request)
    pieces = []
    for worker in (engine.library.encoder, engine.checker):
        name = "step" if worker is engine.library.encoder else "run_piece"
        original = getattr(worker, name)
        setattr(worker, name, lambda *args, original=original: pieces.append(1) or original(*args))
    for tokens, expected_pieces in ((64, 1), (10 * 128, 2)):
        engine.library.encoder.enqueue(range(300), (), "", None)
        engine.library.earn_encoding(6400)
        engine.work_before_batch(tokens)
        assert len(pieces) == expected_pieces
        pieces.clear()
    while engine.library.encoder.busy:
        engine.library.encode_piece()
    pieces.clear()
    engine.checker.add_budget(6400)
    for tokens, expected_pieces in ((64, 1), (50 * 128, 1)):  # 128 earned tokens are two pieces
        engine.work_before_batch(tokens)
        assert len(pieces) == expected_pieces
        pieces.clear()


def test_idle_work_begins_after_a_pause(make_engine, ids, monkeypatch) -> None:
    monkeypatch.setattr(scheduler, "answer_of_first_rank", lambda rank_answer: rank_answer)
    engine = make_engine()
    engine.library.encoder.enqueue(range(200), (), "", None)
    waits_ms, encoded_before = [], -1

    def poll(wait_ms: int) -> bool:
        """A request waits as soon as more than ``encoded_before`` tokens are encoded."""
        waits_ms.append(wait_ms)
        return engine.library.encoder.encoded_tokens > encoded_before

    socket = SimpleNamespace(poll=poll)
    server = scheduler_of(engine)
    server.is_fully_idle = lambda: True
    server.ipc_channels = SimpleNamespace(recv_from_tokenizer=socket)
    for _ in range(2):
        engine.work_before_batch(0)
        scheduler.work_when_idle(server)
    assert waits_ms == [scheduler.PAUSE_MS] * 2
    assert engine.library.encoder.encoded_tokens == 0
    waits_ms.clear()
    for _ in range(3):  # a monitor's request, which is no batch
        encoded_before = engine.library.encoder.encoded_tokens
        scheduler.work_when_idle(server)
    assert set(waits_ms) == {0}
    assert engine.library.encoder.encoded_tokens == 3 * 64


def test_a_request_waits_for_a_layer_of_idle_work_whose_piece_is_repeated(make_engine, monkeypatch):
    monkeypatch.setattr(scheduler, "answer_of_first_rank", lambda rank_answer: rank_answer)
    engine, waits_ms = make_engine(stand_ins=False), []
    encoder = engine.library.encoder
    encoder.enqueue(range(200), (), "", None)
    socket = SimpleNamespace(poll=lambda wait_ms: waits_ms.append(wait_ms) or len(waits_ms) > 2)
    server = scheduler_of(engine)
    server.is_fully_idle = lambda: True
    server.ipc_channels = SimpleNamespace(recv_from_tokenizer=socket)
    scheduler.work_when_idle(server)
    assert len(waits_ms) == 4  # before the piece, before two of its layers, and after it
    assert encoder.encoded_tokens == 0
    encoded_after_request = []
    for _ in range(MAX_STOPS + 2):  # requests come all the time
        engine.work_when_idle(lambda: True)
        encoded_after_request.append(encoder.encoded_tokens)
    assert encoded_after_request == [0] * (MAX_STOPS - 1) + [MIN_RUN_ROWS] * 3
    monkeypatch.setattr(engine.library, "model", SimpleNamespace(ranks="two"))
    waits_ms.clear()
    scheduler.work_when_idle(server)
    assert encoder.encoded_tokens > 2 * MIN_RUN_ROWS  # ranks do not stop inside a piece
    while encoder.busy:
        engine.work_when_idle()
    chunk = engine.library.store.chunks.get(encoder.store.key(range(200), (), ""))
    expected = encode(encoder.model, range(200))
    for stored_kv, expected_kv in ((chunk.raw_k, expected.raw_k), (chunk.v, expected.v)):
        assert torch.allclose(stored_kv, expected_kv, atol=1e-5)


def test_a_chunk_that_fails_to_encode_is_dropped_and_counted(make_engine, ids, monkeypatch) -> None:
    engine = make_engine()
    engine.library.encoder.enqueue(request(*prompt(ids)).origin_input_ids[:DOCUMENT_TOKENS], (), "")
    monkeypatch.setattr(background_encoder, "attempt", lambda *_, **__: 1 / 0)
    assert engine.library.encode_piece() == 0
    assert engine.stats()["fallbacks"] == 1
    assert not engine.library.encoder.busy


def test_reused_kv_is_kept_out_of_the_exact_tree_by_an_assertion(make_engine, ids) -> None:
    engine = make_engine()
    learn(engine, request(*prompt(ids)))
    req = request(*prompt(ids), rid="r")
    scheduler.check_insert(None, req, up_to=100)  # it names no documents
    document_request = queue_req(engine, req)
    scheduler.check_insert(None, req, up_to=100)  # nothing was reused
    document_request.is_fused = True
    scheduler.check_insert(None, req, up_to=100)  # it is in a namespace of its own
    req.extra_key = None
    with pytest.raises(RuntimeError, match="would enter the exact prefix tree"):
        scheduler.check_insert(None, req, up_to=100)


def prefixes_of(engine: DocumentEngine, req) -> list[tuple[int, ...] | None]:
    """Return the prefix after which each document was encoded; ``None`` for one that is not stored."""
    documents = engine.library.load(engine.new_request(req), req.origin_input_ids)
    return [document.chunk.prefix if document.chunk is not None else None for document in documents]


def test_the_position_in_the_prompt_decides_a_documents_head(make_engine, ids) -> None:
    engine = make_engine()
    head = tuple(ids[:SYSTEM_TOKENS].tolist())
    stand_in = head + engine.stand_ins[0]
    learn(engine, request(*prompt(ids)))
    assert prefixes_of(engine, request(*prompt(ids))) == [head, stand_in, stand_in]
    reordered = request(*prompt(ids, (2, 0, 1)))
    assert prefixes_of(engine, reordered) == [stand_in, head, stand_in]  # the stored ones, at once
    learn(engine, reordered)
    for order in ((2, 0, 1), (0, 1, 2), (0, 2, 1)):
        assert prefixes_of(engine, request(*prompt(ids, order))) == [head, stand_in, stand_in]
    assert len(engine.library.store) == 5  # the second document was never first


def test_documents_are_found_behind_any_text(make_engine, ids) -> None:
    """A question before a tool's results, or a system text with the time in it."""
    engine = make_engine()
    learn(engine, request(*prompt(ids)), head_is_known=False)
    assert engine.library.encoder.stats()["encoded_chunks"] == 3
    assert prefixes_of(engine, request(*prompt(ids))) == [engine.stand_ins[0]] * 3
    prompt_ids, bounds = prompt(ids, (2, 0, 1))
    other_req = request([5, *prompt_ids[1:]], bounds)
    assert prefixes_of(engine, other_req) == [engine.stand_ins[0]] * 3
    learn(engine, other_req, head_is_known=False)
    assert engine.library.encoder.stats()["encoded_chunks"] == 3  # nothing was missing


def test_heads_are_bounded_and_of_each_tenants_own() -> None:
    heads = Heads(max_heads=4)
    assert not heads.record_head("mine", (1, 2))
    assert not heads.record_head("yours", (1, 2))
    for i in range(100):
        heads.record_head("invented", (i,))
    assert heads.record_head("mine", (1, 2))
    assert heads.record_head("yours", (1, 2))


def test_the_turns_of_a_conversation_do_not_make_its_head_return(make_engine, ids) -> None:
    engine = make_engine()
    for kept_tokens in (0, 5, 5):
        req = request(*prompt(ids))
        document_request = engine.new_request(req)
        document_request.is_fused, document_request.kept_tokens = True, kept_tokens
        engine.encode_missing(req, document_request, torch.arange(len(req.origin_input_ids)))
        while engine.library.encoder.busy:
            engine.library.encoder.step()
    assert engine.library.encoder.stats()["encoded_chunks"] == 3


def test_a_document_that_nothing_precedes_is_encoded_for_every_position(make_engine, ids) -> None:
    engine = make_engine()
    document = ids[SYSTEM_TOKENS:DOCUMENT_END].tolist()
    learn(engine, request(document + document[-1:], [0, DOCUMENT_TOKENS]))
    assert prefixes_of(engine, request(document + document[-1:], [0, DOCUMENT_TOKENS])) == [()]
    assert prefixes_of(engine, request(*prompt(ids, (1, 0)))) == [None, engine.stand_ins[0]]


def test_no_document_is_exact_behind_a_text_that_is_too_long_to_encode(make_engine, ids) -> None:
    engine = make_engine()
    text = [3] * (LEARN_PREFIX_TOKENS + 1)
    document = ids[SYSTEM_TOKENS:DOCUMENT_END].tolist()
    ids_and_bounds = [*text, *document, 1], [len(text), len(text) + DOCUMENT_TOKENS]
    learn(engine, request(*ids_and_bounds))
    assert prefixes_of(engine, request(*ids_and_bounds)) == [engine.stand_ins[0]]


@pytest.mark.parametrize("stand_ins", [False, True])
@pytest.mark.parametrize("ratio", [0.0, 0.3])
def test_one_document_after_system_text_is_plain_serving(make_engine, llama, ids, stand_ins, ratio):
    """No row is recomputed, and the logits equal a plain prefill."""
    engine = make_engine(stand_ins=stand_ins)
    req = request(*prompt(ids, (1,)))
    learn(engine, req)
    documents = engine.library.load(engine.new_request(req), req.origin_input_ids)
    prompt_ids = torch.tensor(req.origin_input_ids)
    fused_prompt = FusedPrompt(prompt_ids, tuple(document.placed_from(0) for document in documents))
    cache = dense_cache(llama, len(prompt_ids))
    fused = fused_prefill(llama, fused_prompt, cache, make_selector("question"), ratio)
    expected = llama.logits(prefill(llama, prompt_ids, dense_cache(llama, len(prompt_ids))))[-1]
    assert fused.rows.tolist() == [*range(SYSTEM_TOKENS), *range(DOCUMENT_END, len(prompt_ids))]
    assert (fused.logits - expected).abs().max() < 1e-4


def test_a_long_prompt_uses_a_short_ones_encoding_and_requests_more_stand_ins(
    make_engine, ids, monkeypatch
) -> None:
    engine = make_engine()
    short_stand_ins, long_stand_ins = engine.stand_ins
    assert long_stand_ins[: len(short_stand_ins)] == short_stand_ins
    learn(engine, request(*prompt(ids)), head_is_known=False)
    prompt_ids, bounds = prompt(ids)
    monkeypatch.setattr(request_module, "MIN_LONG_PROMPT_TOKENS", len(prompt_ids))
    long_req = request([7, *prompt_ids[1:]], bounds)
    assert prefixes_of(engine, long_req) == [short_stand_ins] * 3  # at once
    learn(engine, long_req, head_is_known=False)
    assert prefixes_of(engine, long_req) == [long_stand_ins] * 3
    monkeypatch.undo()
    short_req = request([8, *prompt_ids[1:]], bounds)
    for key, chunk in list(engine.library.store.chunks.items()):
        if chunk.prefix == short_stand_ins:
            engine.library.store.delete(key)
    learn(engine, short_req, head_is_known=False)
    assert prefixes_of(engine, short_req) == [long_stand_ins] * 3  # as good, so not encoded again


def test_many_readings_collect_the_counters_a_bounded_number_of_times(make_engine, monkeypatch):
    engine, read_times_s = make_engine(), []
    collect = engine.stats
    monkeypatch.setattr(engine, "stats", lambda: read_times_s.append(time.monotonic()) or collect())
    output = SimpleNamespace(internal_state={})
    for _ in range(500):
        scheduler.add_counters(output, scheduler_of(engine))
        assert output.internal_state["canopy_documents"]["fused_requests"] == 0
    span_s = read_times_s[-1] - read_times_s[0]
    assert len(read_times_s) <= READING_BURST + 2 + READINGS_PER_S * span_s
