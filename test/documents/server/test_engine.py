"""State of a scheduler's engine: addresses, encoding, bounds."""

import time
from types import SimpleNamespace

import pytest
import torch

from canopy_documents.fuse import background_encoder
from canopy_documents.fuse.cache import dense_cache
from canopy_documents.fuse.fusion import fused_prefill
from canopy_documents.fuse.rows import MAX_STOPS, MIN_ROWS, prefill
from canopy_documents.fuse.selectors import make_selector
from canopy_documents.server import engine as engines
from canopy_documents.server import library, scheduler
from canopy_documents.server import request as requests
from canopy_documents.server.engine import READ, DocumentEngine
from canopy_documents.server.options import LEARN_PREFIX_TOKENS
from canopy_documents.store.chunk import FusedPrompt
from canopy_documents.text.variants import Heads
from support.document_engine import (
    LENGTH,
    SYSTEM,
    know_head,
    learn,
    prompt,
    queued,
    request,
    scheduler_of,
    tiers,
)
from support.fused_prompts import encode


def test_only_a_first_document_is_stored_from_an_ordinary_prefill(make, llama, ids, monkeypatch):
    engine = make()
    stand_in = len(engine.stand_ins[0])
    out = ids[:SYSTEM].tolist() + [7] * stand_in + ids[SYSTEM : SYSTEM + LENGTH].tolist()
    at = SYSTEM + stand_in  # as far in as the prefix that it is encoded behind is long
    req = request([*out, 1], [SYSTEM, at, at, at + LENGTH])
    state = engine.new_request(req)
    know_head(engine, state)
    taken = []

    def capture(model, cache, document, start, prefix):
        taken.append(start)
        return encode(llama, document, prefix)

    monkeypatch.setattr(library, "capture", capture)
    monkeypatch.setattr(engines.model_view, "row_cache", lambda *_: None)
    engine.encode_missing(req, state, torch.arange(len(out)))
    assert taken == [SYSTEM]
    assert len(engine.library.encoder.queue) == 1
    assert tiers(engine, req) == ["host", None]


@pytest.mark.parametrize("left", [[0], None])
def test_a_prompt_that_was_replaced_or_cut_is_not_read(make, ids, left) -> None:
    engine = make()
    out, bounds = prompt(ids)
    req = request(out, bounds)
    state = engine.new_request(req)
    req.origin_input_ids = left or out[: bounds[-1] - 5]
    assert not engine.may_fuse(req, state)
    assert state.reason == "aborted or truncated"
    engine.encode_missing(req, state, torch.arange(1))
    assert not engine.library.encoder.busy


def test_a_waiting_requests_documents_on_disk_are_read(make, ids, tmp_path) -> None:
    engine = make(disk_mb=64, directory=str(tmp_path))
    req, disk = request(*prompt(ids)), engine.library.store.disk
    learn(engine, req)
    disk.finish()
    for key in list(engine.library.store.chunks):
        engine.library.store.delete(key)
    state = engine.new_request(req)
    assert tiers(engine, req) == ["disk"] * 3
    engine.library.read_ahead(state)
    assert set(disk._reads) == {keys[0] for keys in state.keys}
    found = engine.library.open(state, req.origin_input_ids)
    assert [one.tier for one in found] == ["disk"] * 3
    assert not disk._reads
    assert tiers(engine, req) == ["host"] * 3


def test_a_prefill_pays_for_its_share_and_a_later_forward_does_the_work(make, ids) -> None:
    engine = make(learn_share=0.1, stand_ins=False)
    req = request(*prompt(ids))
    state = engine.new_request(req)
    state.fused = True
    engine.encode_missing(req, state, torch.arange(len(req.origin_input_ids)))
    engine.library.earn_encoding(630)  # one piece is 64 tokens
    engine.work_before_batch(10_000)
    assert engine.library.encoder.encoded_tokens == 0
    engine.library.earn_encoding(10)
    engine.work_before_batch(64)
    assert engine.library.encoder.encoded_tokens == SYSTEM + LENGTH
    assert engine.library.encode_credit == 64 - (SYSTEM + LENGTH)
    while engine.library.encoder.busy:
        engine.library.encode_piece()
    engine.library.earn_encoding(640)
    assert engine.library.encode_credit == 0  # nothing waits: nothing is saved up


def test_long_prompts_do_not_save_up_encoding_that_short_prompts_then_wait_for(make) -> None:
    engine, delayed = make(learn_share=0.5, stand_ins=False), 0
    for number in range(30):
        engine.library.encoder.enqueue(range(300), (), f"{number}", None)
        engine.library.earn_encoding(1024)
        engine.work_before_batch(1)
    assert engine.library.encode_credit <= 0.5 * 1024
    for number in range(30, 50):
        engine.library.encoder.enqueue(range(300), (), f"{number}", None)
        before = engine.library.encoder.encoded_tokens
        engine.work_before_batch(1)
        delayed += engine.library.encoder.encoded_tokens > before
    assert 0 < delayed <= 8


def test_a_long_prompt_waits_for_few_of_the_pieces_that_were_earned(make, ids) -> None:
    engine = make(learn_share=0.1, stand_ins=False)
    engine.checker.limits.every = 1
    learn(engine, request(*prompt(ids, (2,))))
    served = request(*prompt(ids, (2,)))
    state = engine.new_request(served)
    state.fused = True
    engine.offer_check(served, state)
    pieces = []
    for did in (engine.library.encoder, engine.checker):
        name = "step" if did is engine.library.encoder else "run_piece"
        run = getattr(did, name)
        setattr(did, name, lambda *args, run=run: pieces.append(1) or run(*args))
    for tokens, most in ((64, 1), (10 * 128, 2)):
        engine.library.encoder.enqueue(range(300), (), "", None)
        engine.library.earn_encoding(6400)
        engine.work_before_batch(tokens)
        assert len(pieces) == most
        pieces.clear()
    while engine.library.encoder.busy:
        engine.library.encode_piece()
    pieces.clear()
    engine.checker.add_budget(6400)
    for tokens, most in ((64, 1), (50 * 128, 1)):  # 128 earned tokens are two pieces
        engine.work_before_batch(tokens)
        assert len(pieces) == most
        pieces.clear()


def test_idle_work_begins_after_a_pause(make, ids, monkeypatch) -> None:
    monkeypatch.setattr(scheduler, "answer_of_first_rank", lambda mine: mine)
    engine = make()
    engine.library.encoder.enqueue(range(200), (), "", None)
    waited = []

    def poll(wait_ms: int) -> bool:
        waited.append(wait_ms)
        return comes(len(waited))

    socket = SimpleNamespace(poll=poll)
    server = scheduler_of(engine)
    server.is_fully_idle = lambda: True
    server.ipc_channels = SimpleNamespace(recv_from_tokenizer=socket)
    comes = lambda polls: True  # noqa: E731
    for _ in range(2):
        engine.work_before_batch(0)
        scheduler.work_when_idle(server)
    assert waited == [scheduler.PAUSE_MS] * 2
    assert engine.library.encoder.encoded_tokens == 0
    waited.clear()
    for _ in range(3):  # a monitor asks, which is no batch
        before = engine.library.encoder.encoded_tokens
        comes = lambda polls: engine.library.encoder.encoded_tokens > before  # noqa: B023, E731
        scheduler.work_when_idle(server)
    assert set(waited) == {0}
    assert engine.library.encoder.encoded_tokens == 3 * 64


def test_a_request_waits_for_a_layer_of_idle_work_and_the_piece_is_repeated(make, monkeypatch):
    monkeypatch.setattr(scheduler, "answer_of_first_rank", lambda mine: mine)
    engine, waited = make(stand_ins=False), []
    encoder = engine.library.encoder
    encoder.enqueue(range(200), (), "", None)
    socket = SimpleNamespace(poll=lambda wait_ms: waited.append(wait_ms) or len(waited) > 2)
    server = scheduler_of(engine)
    server.is_fully_idle = lambda: True
    server.ipc_channels = SimpleNamespace(recv_from_tokenizer=socket)
    scheduler.work_when_idle(server)
    assert len(waited) == 4  # before the piece, before two of its layers, and after it
    assert encoder.encoded_tokens == 0
    done = []
    for _ in range(MAX_STOPS + 2):  # requests come all the time
        engine.work_when_idle(lambda: True)
        done.append(encoder.encoded_tokens)
    assert done == [0] * (MAX_STOPS - 1) + [MIN_ROWS] * 3
    monkeypatch.setattr(engine.library, "model", SimpleNamespace(ranks="two"))
    waited.clear()
    scheduler.work_when_idle(server)
    assert encoder.encoded_tokens > 2 * MIN_ROWS  # ranks do not stop inside a piece
    while encoder.busy:
        engine.work_when_idle()
    found = engine.library.store.chunks.get(encoder.store.key(range(200), (), ""))
    whole = encode(encoder.model, range(200))
    for got, expected in ((found.raw_k, whole.raw_k), (found.v, whole.v)):
        assert torch.allclose(got, expected, atol=1e-5)


def test_a_chunk_that_cannot_be_encoded_is_dropped_and_counted(make, ids, monkeypatch) -> None:
    engine = make()
    req = request(*prompt(ids))
    engine.library.encoder.enqueue(req.origin_input_ids[:LENGTH], (), "")
    monkeypatch.setattr(background_encoder, "attempt", lambda *_, **__: 1 / 0)
    assert engine.library.encode_piece() == 0
    assert engine.stats()["fallbacks"] == 1
    assert not engine.library.encoder.busy


def test_reused_kv_is_kept_out_of_the_exact_tree_by_an_assertion(make, ids) -> None:
    engine = make()
    learn(engine, request(*prompt(ids)))
    req = request(*prompt(ids), rid="r")
    scheduler.check_insert(None, req, up_to=100)  # it names no documents
    state = queued(engine, req)
    scheduler.check_insert(None, req, up_to=100)  # nothing was reused
    state.fused = True
    scheduler.check_insert(None, req, up_to=100)  # it is in a namespace of its own
    req.extra_key = None
    with pytest.raises(RuntimeError, match="would enter the exact prefix tree"):
        scheduler.check_insert(None, req, up_to=100)


def held(engine: DocumentEngine, req) -> list[tuple[int, ...] | None]:
    """Return the context that each used document of a request was encoded behind."""
    found = engine.library.open(engine.new_request(req), req.origin_input_ids)
    return [one.chunk.prefix if one.chunk is not None else None for one in found]


def test_the_position_in_the_prompt_decides_a_documents_head(make, ids) -> None:
    engine = make()
    head = tuple(ids[:SYSTEM].tolist())
    later = head + engine.stand_ins[0]
    learn(engine, request(*prompt(ids)))
    assert held(engine, request(*prompt(ids))) == [head, later, later]
    turned = request(*prompt(ids, (2, 0, 1)))
    assert held(engine, turned) == [later, head, later]  # what there is, at once
    learn(engine, turned)
    for order in ((2, 0, 1), (0, 1, 2), (0, 2, 1)):
        assert held(engine, request(*prompt(ids, order))) == [head, later, later]
    assert len(engine.library.store) == 5  # the second document was never first


def test_documents_are_found_behind_any_text(make, ids) -> None:
    """A question before a tool's results, or a system text with the time in it."""
    engine = make()
    learn(engine, request(*prompt(ids)), head_returns=False)
    assert engine.library.encoder.stats()["encoded_chunks"] == 3
    assert held(engine, request(*prompt(ids))) == [engine.stand_ins[0]] * 3
    out, bounds = prompt(ids, (2, 0, 1))
    other = request([5, *out[1:]], bounds)
    assert held(engine, other) == [engine.stand_ins[0]] * 3
    learn(engine, other, head_returns=False)
    assert engine.library.encoder.stats()["encoded_chunks"] == 3  # nothing was missing


def test_heads_are_bounded_and_of_each_tenants_own() -> None:
    heads = Heads(most=4)
    assert not heads.seen_before("mine", (1, 2))
    assert not heads.seen_before("yours", (1, 2))
    for i in range(100):
        heads.seen_before("invented", (i,))
    assert heads.seen_before("mine", (1, 2))
    assert heads.seen_before("yours", (1, 2))


def test_the_turns_of_a_conversation_do_not_make_its_head_return(make, ids) -> None:
    engine = make()
    for kept in (0, 5, 5):
        req = request(*prompt(ids))
        state = engine.new_request(req)
        state.fused, state.kept = True, kept
        engine.encode_missing(req, state, torch.arange(len(req.origin_input_ids)))
        while engine.library.encoder.busy:
            engine.library.encoder.step()
    assert engine.library.encoder.stats()["encoded_chunks"] == 3


def test_a_document_that_nothing_precedes_is_encoded_for_every_place(make, ids) -> None:
    engine = make()
    document = ids[SYSTEM : SYSTEM + LENGTH].tolist()
    learn(engine, request(document + document[-1:], [0, LENGTH]))
    assert held(engine, request(document + document[-1:], [0, LENGTH])) == [()]
    assert held(engine, request(*prompt(ids, (1, 0)))) == [None, engine.stand_ins[0]]


def test_no_document_is_exact_behind_a_text_that_is_too_long_to_encode(make, ids) -> None:
    engine = make()
    text = [3] * (LEARN_PREFIX_TOKENS + 1)
    document = ids[SYSTEM : SYSTEM + LENGTH].tolist()
    learn(engine, request([*text, *document, 1], [len(text), len(text) + LENGTH]))
    assert held(engine, request([*text, *document, 1], [len(text), len(text) + LENGTH])) == [
        engine.stand_ins[0]
    ]


@pytest.mark.parametrize("stand_ins", [False, True])
@pytest.mark.parametrize("ratio", [0.0, 0.3])
def test_one_document_behind_the_system_text_is_plain_serving(make, llama, ids, stand_ins, ratio):
    """No row is recomputed, and the logits equal a plain prefill."""
    engine = make(stand_ins=stand_ins)
    req = request(*prompt(ids, (1,)))
    learn(engine, req)
    found = engine.library.open(engine.new_request(req), req.origin_input_ids)
    whole = torch.tensor(req.origin_input_ids)
    fused = FusedPrompt(whole, tuple(one.placed_from(0) for one in found))
    got = fused_prefill(
        llama, fused, dense_cache(llama, len(whole)), make_selector("question"), ratio
    )
    plain = llama.logits(prefill(llama, whole, dense_cache(llama, len(whole))))[-1]
    assert got.rows.tolist() == [*range(SYSTEM), *range(SYSTEM + LENGTH, len(whole))]
    assert (got.logits - plain).abs().max() < 1e-4


def test_a_long_prompt_uses_a_short_ones_encoding_and_requests_more_stand_ins(
    make, ids, monkeypatch
) -> None:
    engine = make()
    few, every = engine.stand_ins
    assert every[: len(few)] == few
    learn(engine, request(*prompt(ids)), head_returns=False)
    out, bounds = prompt(ids)
    monkeypatch.setattr(requests, "LONG_TOKENS", len(out))
    long = request([7, *out[1:]], bounds)
    assert held(engine, long) == [few] * 3  # at once
    learn(engine, long, head_returns=False)
    assert held(engine, long) == [every] * 3
    monkeypatch.undo()
    short = request([8, *out[1:]], bounds)
    for key, chunk in list(engine.library.store.chunks.items()):
        if chunk.prefix == few:
            engine.library.store.delete(key)
    learn(engine, short, head_returns=False)
    assert held(engine, short) == [every] * 3  # as good, so not encoded again


def test_a_flood_of_readings_collects_the_counters_a_bounded_number_of_times(make, monkeypatch):
    engine, collected = make(), []
    stats = engine.stats
    monkeypatch.setattr(engine, "stats", lambda: collected.append(time.monotonic()) or stats())
    result = SimpleNamespace(internal_state={})
    for _ in range(500):
        scheduler.internal_state(result, scheduler_of(engine))
        assert result.internal_state["canopy_documents"]["fused_requests"] == 0
    per_s, burst = READ
    assert len(collected) <= burst + 2 + per_s * (collected[-1] - collected[0])
