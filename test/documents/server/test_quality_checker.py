"""The quality check in a server: waiting prompts, their checks in idle time, and the consequences."""

import random
from copy import copy
from types import SimpleNamespace

import pytest
import torch

from canopy_documents.fuse import rows
from canopy_documents.quality.checker import (
    LOAD_SHARE,
    MAX_CHECKS,
    MAX_WAIT_S,
    MAX_WORK_CHECKS,
    QualityChecker,
    max_pieces,
)
from canopy_documents.quality.tenant_limits import RAISED, SERVED, STOPPED, QualityLimits
from canopy_documents.server import engine as engines
from canopy_documents.server.engine import DocumentEngine
from canopy_documents.server.options import ReuseOptions
from canopy_documents.server.request import DIFFERED
from sglang_canopy.wire.stamp import STAMP_KEY
from support.document_engine import bare_runner, learn, queue_req, request

SYSTEM_TOKENS, DOCUMENT_TOKENS, QUESTION_TOKENS = 40, 120, 8
PROMPT_TOKENS = SYSTEM_TOKENS + DOCUMENT_TOKENS + QUESTION_TOKENS
BOUNDS = [SYSTEM_TOKENS, SYSTEM_TOKENS + DOCUMENT_TOKENS]


@pytest.fixture
def engine(make_engine):
    """Every prompt is checked. Its one document is encoded after the prompt's own prefix, so reuse is exact."""
    engine = make_engine(stand_ins=False)
    engine.checker.limits.interval = 1
    return engine


def prompt_req(ids, params=None, salt=None, **_):
    req = request(ids[:PROMPT_TOKENS].tolist(), BOUNDS, salt, rid="r")
    req.sampling_params.custom_params.update(params or {})
    return req


def serve(engine: DocumentEngine, req, time_s: float = 0.0):
    """Complete a fused prompt, or a prompt whose tenant's reuse is stopped."""
    document_request = queue_req(engine, copy(req))
    document_request.time_s = time_s
    document_request.is_fused = document_request.kept_key is not None
    engine.offer_check(req, document_request)
    return document_request


def run_idle_work(engine: DocumentEngine) -> None:
    while engine.has_idle_work:
        engine.work_when_idle()


def shuffle_values(engine: DocumentEngine) -> None:
    """The fault: the values of every stored document belong to other tokens."""
    for chunk in engine.library.store.chunks.values():
        chunk.v[:] = chunk.v.flip(1)


def quality_counters(engine: DocumentEngine):
    return engine.counters()["quality"]


def test_shuffled_kv_stops_reuse_until_kv_is_encoded_again(engine, ids, caplog) -> None:
    req = prompt_req(ids)
    learn(engine, req)
    for _ in range(4):
        serve(engine, req)
        run_idle_work(engine)
    assert (quality_counters(engine)["checked"], quality_counters(engine)["differed"]) == (4, 0)
    shuffle_values(engine)
    for _ in range(7):
        serve(engine, req)
        run_idle_work(engine)
    assert engine.checker.limits.quality_level(None) == RAISED
    assert engine.ratio_for(queue_req(engine, prompt_req(ids)), []) == 0.3
    for _ in range(14):
        document_request = serve(engine, req)
        run_idle_work(engine)
    assert engine.checker.limits.quality_level(None) == STOPPED
    assert "now stopped" in caplog.text
    document_request = serve(engine, req)
    assert (document_request.is_fused, document_request.reason) == (False, DIFFERED)
    run_idle_work(engine)  # it differs: the stored chunks are deleted
    assert engine.library.store.stats()["tiers"]["host"]["used_bytes"] == 0
    learn(engine, req)
    for _ in range(32):
        serve(engine, req)
        run_idle_work(engine)
    assert engine.checker.limits.quality_level(None) == SERVED
    assert "now served" in caplog.text


def test_a_tenants_fault_affects_no_other_tenant(engine, ids) -> None:
    good_req, faulty_req = prompt_req(ids), prompt_req(ids, salt="other")
    learn(engine, faulty_req)
    shuffle_values(engine)
    learn(engine, good_req)
    for _ in range(20):
        serve(engine, good_req)
        serve(engine, faulty_req)
        run_idle_work(engine)
    assert not serve(engine, faulty_req).is_fused
    assert serve(engine, good_req).is_fused
    assert engine.checker.limits.tenants[None].differed == 0


def test_a_request_with_its_own_ratio_is_not_checked(engine, ids) -> None:
    learn(engine, prompt_req(ids))
    serve(engine, prompt_req(ids, params={"canopy_recompute_ratio": 0.5}))
    assert not engine.checker.busy


def test_a_check_between_the_prompts_of_a_client_is_done_in_its_next_pause(engine, ids) -> None:
    learn(engine, prompt_req(ids))
    serve(engine, prompt_req(ids))
    for _ in range(20):
        engine.work_when_idle()
        engine.checker.interrupt(engine.time_s)
    run_idle_work(engine)
    assert quality_counters(engine)["checked"] == 1


def test_a_check_that_is_interrupted_repeatedly_is_dropped(engine, ids) -> None:
    learn(engine, prompt_req(ids))
    serve(engine, prompt_req(ids))
    pieces = 0
    while engine.checker.busy:
        for _ in range(10):
            engine.work_when_idle()
            pieces += 1
        engine.checker.interrupt(engine.time_s)
    check_pieces = max_pieces(PROMPT_TOKENS, engine.checker.piece_tokens)
    assert MAX_WORK_CHECKS * check_pieces <= pieces < MAX_WORK_CHECKS * check_pieces + 10
    assert quality_counters(engine)["dropped"] == {"interrupted": 1}
    engine.checker.interrupt(engine.time_s)  # no check is running


def test_a_text_is_kept_no_longer_than_its_check(engine, ids) -> None:
    learn(engine, prompt_req(ids))
    serve(engine, prompt_req(ids))
    run_idle_work(engine)
    assert not engine.checker.waiting
    serve(engine, prompt_req(ids))
    engine.time_s = MAX_WAIT_S + 1
    engine.work_when_idle()
    assert not engine.checker.waiting
    assert quality_counters(engine)["dropped"] == {"too old": 1}
    assert quality_counters(engine)["checked"] == 1


def test_a_server_that_is_never_idle_checks_within_its_budget(engine, ids) -> None:
    learn(engine, prompt_req(ids))
    served_rows = pieces = 0
    batch_rows, run_piece = 500, engine.checker.run_piece

    def count_and_run(*args) -> None:
        nonlocal pieces
        pieces += 1
        run_piece(*args)

    engine.checker.run_piece = count_and_run
    while quality_counters(engine)["checked"] < 3:
        engine.work_before_batch(batch_rows)
        serve(engine, prompt_req(ids))
        engine.checker.add_budget(batch_rows)
        served_rows += batch_rows
        assert served_rows < 2_000_000
    assert pieces * engine.checker.piece_tokens <= LOAD_SHARE * served_rows
    assert not quality_counters(engine)["dropped"].get("interrupted")


@pytest.mark.parametrize("has_check_begun", [False, True])
def test_an_evicted_document_is_no_difference(engine, ids, has_check_begun) -> None:
    learn(engine, prompt_req(ids))
    serve(engine, prompt_req(ids))
    if has_check_begun:
        engine.work_when_idle()
    for keys in engine.checker.waiting[0].request.keys:
        engine.library.store.delete(keys[0])
    run_idle_work(engine)
    assert quality_counters(engine)["dropped"] == {"no longer stored": 1}
    assert quality_counters(engine)["checked"] == 0


def test_a_busy_server_keeps_no_text_longer_either(engine, ids) -> None:
    """Without idle time no check runs, so the next request drops a prompt that is too old."""
    learn(engine, prompt_req(ids))
    serve(engine, prompt_req(ids))
    later_req = prompt_req(ids)
    later_req.sampling_params.custom_params = {STAMP_KEY: {"time": MAX_WAIT_S + 1}}
    assert engine.new_request(later_req) is None, "nothing of it concerns documents"
    engine.checker.interrupt(engine.time_s)
    assert not engine.checker.waiting
    assert quality_counters(engine)["dropped"] == {"too old": 1}


def test_one_prompt_of_each_tenant_waits_and_invented_tenants_displace_no_busy_tenant() -> None:
    checker = QualityChecker(QualityLimits(100, 0.4), None, 64)

    def offer(tenant: str, prompts: int) -> None:
        for _ in range(prompts):
            checker.offer([1, 2], SimpleNamespace(tenant=tenant, time_s=0.0), 0.15)

    def is_waiting(tenant: str) -> bool:
        return any(check.request.tenant == tenant for check in checker.waiting)

    for salt in range(MAX_CHECKS):
        offer(f"salt {salt}", 10)
    offer("busy", 30)
    assert is_waiting("busy")
    offer("differing", 9)
    checker.limits.record_check("differing", SERVED, True)
    offer("differing", 1)
    assert is_waiting("differing")
    for salt in range(2 * MAX_CHECKS):  # with many prompts each
        offer(f"more {salt}", 60)
    assert is_waiting("differing")
    waiting_tenants = {check.request.tenant for check in checker.waiting}
    assert len(checker.waiting) == len(waiting_tenants) == MAX_CHECKS


def test_a_deletion_does_not_restart_another_tenants_check(engine, ids, monkeypatch) -> None:
    learn(engine, prompt_req(ids))
    learn(engine, prompt_req(ids, salt="other"))
    monkeypatch.setattr(rows, "piece_tokens", lambda device: 64)
    pieces = []
    for deleted_tenant in (None, "other"):
        serve(engine, prompt_req(ids))
        serve(engine, prompt_req(ids, salt="other"))
        check, _ = engine.checker.waiting
        engine.work_when_idle()
        engine.work_when_idle()
        if deleted_tenant is not None:
            engine.checker.forget(deleted_tenant)
            assert list(engine.checker.waiting) == [check]
        run_idle_work(engine)
        pieces.append(check.pieces)
    assert pieces[0] == pieces[1] > 2


def test_no_step_of_a_check_computes_more_than_a_piece(engine, ids, monkeypatch) -> None:
    learn(engine, prompt_req(ids))
    monkeypatch.setattr(rows, "piece_tokens", lambda device: 8)
    serve(engine, prompt_req(ids))
    computed_rows, run_rows = [], rows.run_rows

    def count_and_run(model, ids, *args, **kwargs):
        computed_rows.append(len(ids))
        return run_rows(model, ids, *args, **kwargs)

    monkeypatch.setattr(rows, "run_rows", count_and_run)
    while quality_counters(engine)["checked"] == 0:
        rows_before = sum(computed_rows)
        engine.work_when_idle()
        assert sum(computed_rows) - rows_before <= 8
    assert sum(computed_rows) >= 2 * (SYSTEM_TOKENS + QUESTION_TOKENS) + DOCUMENT_TOKENS
    assert quality_counters(engine)["differed"] == 0


def test_a_check_that_fails_is_counted_and_the_next_one_runs(engine, ids, monkeypatch) -> None:
    learn(engine, prompt_req(ids))
    serve(engine, prompt_req(ids))
    with monkeypatch.context() as patch:
        patch.setattr("canopy_documents.quality.checker.answers_differ", None)
        run_idle_work(engine)
    serve(engine, prompt_req(ids))
    run_idle_work(engine)
    assert quality_counters(engine)["dropped"] == {"failed": 1}
    assert quality_counters(engine)["checked"] == 1


@pytest.mark.long
@pytest.mark.timeout(1500)
def test_shuffled_kv_of_real_text_is_acted_on_and_clean_text_is_not(smollm2, data_dir, monkeypatch):
    """Three documents of HotpotQA a prompt, in any order; the server's own settings."""
    from comparators.questions import read_examples
    from comparators.weights import load
    from transformers import AutoTokenizer

    hotpotqa_path = data_dir / "rag" / "hotpotqa_100.json"
    if not hotpotqa_path.exists():
        pytest.skip(f"{hotpotqa_path} is absent")
    model, tokenizer = load(smollm2), AutoTokenizer.from_pretrained(smollm2)
    monkeypatch.setattr(engines.model_view, "served_model", lambda *_: model)
    engine = DocumentEngine(bare_runner(), ReuseOptions(memory_mb=512))
    rng, examples = random.Random(5), read_examples(hotpotqa_path, 8)
    documents = [tokenizer.encode(e.documents[i])[:70] for e in examples for i in range(2)]
    system = tokenizer.encode("Answer from the documents that follow.\n\n")

    def prompt_of(document_numbers):
        bounds, ids = [], list(system)
        for i in document_numbers:
            bounds += [len(ids), len(ids) + len(documents[i])]
            ids += documents[i]
        question = tokenizer.encode(f"\n\nQuestion: {rng.choice(examples).question}\nAnswer:")
        prompt_ids = torch.tensor([*ids, *question])
        req = prompt_req(prompt_ids, params={"canopy_document_bounds": bounds})
        req.origin_input_ids = prompt_ids.tolist()
        return req

    for i in range(len(documents)):
        learn(engine, prompt_of([i]))

    def prompts_until(level: int, max_prompts: int) -> int:
        for count in range(1, max_prompts + 1):
            serve(engine, prompt_of(rng.sample(range(len(documents)), 3)))
            run_idle_work(engine)
            if engine.checker.limits.quality_level(None) == level:
                return count
        return max_prompts + 1

    assert prompts_until(RAISED, 20) == 21
    shuffle_values(engine)
    raised_after = prompts_until(RAISED, 160)
    stopped_after = raised_after + prompts_until(STOPPED, 300 - raised_after)
    assert raised_after <= 160
    assert stopped_after <= 300
