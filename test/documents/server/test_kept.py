"""Approximate KV in the tree: which requests share it, and that exact ones never do."""

from types import SimpleNamespace

import pytest
import torch

from canopy_documents.quality import checker as checkers
from canopy_documents.quality.tenant_limits import RAISED, STOPPED, TenantQuality
from canopy_documents.server import engine as engines
from canopy_documents.server import kept, library, scheduler
from canopy_documents.server.request import DIFFERED
from sglang_canopy import tenant as tenants
from sglang_canopy.errors import CanopyError
from support.document_engine import SYSTEM_TOKENS, learn, prompt, queue_req, request, scheduler_of


def request_with(ids, params=None, **fields):
    req = request(*prompt(ids), rid="r", **fields)
    req.sampling_params.custom_params.update(params or {})
    return req


@pytest.fixture
def make_engine(make_engine, ids):
    """``make_engine(...)``: an engine that has stored the documents of two tenants."""

    def new_engine(**options):
        engine = make_engine(**options)
        for salt in (None, "other", "secret"):
            learn(engine, request_with(ids, salt=salt))
        return engine

    return new_engine


def extra_key_of(engine, ids, params=None, **fields) -> str | None:
    req = request_with(ids, params, **fields)
    queue_req(engine, req)
    return req.extra_key


def set_level(engine, level: int, tenant: str | None = None) -> None:
    engine.checker.limits.tenants[tenant] = TenantQuality(level)


@pytest.fixture
def engine(make_engine):
    return make_engine()


def test_requests_share_kept_kv_under_equal_settings_alone(engine, make_engine, ids) -> None:
    key = extra_key_of(engine, ids)
    assert key is not None
    assert tenants.is_documents_key(key)
    assert extra_key_of(engine, ids) == key
    keys = [key]
    keys.append(extra_key_of(engine, ids, {"canopy_recompute_ratio": 0.3}))
    keys.append(extra_key_of(make_engine(selector="frequency"), ids))
    keys.append(extra_key_of(make_engine(stand_ins=False), ids))
    keys.append(extra_key_of(make_engine(ratio=0.2), ids))
    calibrated_engine = make_engine()
    calibrated_engine.ratios = {"host": 0.4}
    keys.append(extra_key_of(calibrated_engine, ids))
    set_level(engine, RAISED)
    keys.append(extra_key_of(engine, ids))
    assert len(set(keys)) == len(keys)


def test_other_weights_have_another_key(engine, ids, monkeypatch) -> None:
    key_before = extra_key_of(engine, ids)
    monkeypatch.setattr(engine.library, "model", SimpleNamespace(identity="other weights"))
    assert extra_key_of(engine, ids) != key_before


def test_a_request_in_the_tree_of_documents_is_still_its_tenants(engine, ids) -> None:
    tenant_req = request_with(ids, salt="secret")
    tenant_req.extra_key = "mine"
    engine.count_matched_tokens = lambda req, key: int(tenants.is_documents_key(key))
    tenant_before = tenants.tenant_of_req(tenant_req)
    documents = queue_req(engine, tenant_req)
    assert tenant_req.extra_key.startswith("mine\x00")
    assert tenants.tenant_of_req(tenant_req) == documents.tenant == tenant_before
    assert tenant_req.cache_salt == "secret"


@pytest.mark.parametrize(
    "fields",
    [
        {"return_logprob": True, "logprob_start_len": 0},
        {"lora_id": "a" * 32},
        {"session": object()},
        {"beam_group": object()},
    ],
)
def test_a_request_that_runs_normally_keeps_its_clients_key(make_engine, ids, fields) -> None:
    assert extra_key_of(make_engine(), ids, **fields) is None


@pytest.mark.parametrize(
    ("exact_tokens", "kept_tokens", "enters_tree"),
    [(0, 0, True), (101, 0, True), (103, 0, False), (138, 137, False), (120, 128, True)],
)
def test_a_request_changes_its_key_only_if_that_saves_more_than_its_exact_prefix(
    engine, ids, exact_tokens, kept_tokens, enters_tree
) -> None:
    """Three documents of 40 tokens save 102 at ratio 0.15."""
    engine.count_matched_tokens = lambda req, key: (
        kept_tokens if tenants.is_documents_key(key) else exact_tokens
    )
    assert (extra_key_of(engine, ids) is not None) == enters_tree


def test_a_prompt_that_is_too_long_extends_its_earlier_turns(make_engine, ids) -> None:
    engine = make_engine(prompt_tokens=100)
    for tokens, enters_tree in ((0, False), (60, True)):
        engine.count_matched_tokens = lambda req, key, n=tokens: n * tenants.is_documents_key(key)
        long_req = request_with(ids)
        documents = queue_req(engine, long_req)
        assert (long_req.extra_key is not None) == enters_tree
        assert not engine.may_fuse(long_req, documents)
        documents.begin_window(long_req, tokens, len(long_req.origin_input_ids))
        report = engine.report_prompt(long_req, documents)
        expected = (True, None) if enters_tree else (False, "more than 100 tokens")
        assert (report["fused"], report.get("why")) == (expected)


def test_very_many_documents_are_computed(make_engine, ids) -> None:
    req = request([1] * 2000, [bound for i in range(300) for bound in (5 * i, 5 * i + 5)], rid="r")
    engine = make_engine()
    documents = queue_req(engine, req)
    assert (documents.keys, documents.reason) == ((), "more than 256 documents")
    assert engine.report_prompt(req, documents)["why"] == documents.reason


def test_ratio_1_is_exact_and_keeps_its_clients_key(engine, make_engine, ids) -> None:
    for engine_at_ratio in (engine, make_engine(ratio=1.0)):
        req = request_with(ids, {"canopy_recompute_ratio": 1} if engine_at_ratio is engine else {})
        documents = queue_req(engine_at_ratio, req)
        assert req.extra_key is None
        assert engine_at_ratio.may_fuse(req, documents)


def test_a_step_to_ratio_1_applies_to_the_whole_request(make_engine, ids) -> None:
    engine = make_engine(ratio=0.6)
    set_level(engine, RAISED)
    req = request_with(ids)
    documents = queue_req(engine, req)
    assert req.extra_key is None
    set_level(engine, 0)  # while it waits
    assert engine.ratio_for(documents, []) == 1.0


def test_a_retraction_changes_nothing(engine, ids) -> None:
    req = request_with(ids)
    documents = queue_req(engine, req)
    key_before = req.extra_key
    set_level(engine, RAISED)
    scheduler.set_extra_key(scheduler_of(engine), req)
    assert req.extra_key == key_before == documents.kept_key


def test_a_request_whose_namespace_cannot_be_named_runs_normally(engine, ids, monkeypatch) -> None:
    monkeypatch.setattr(kept, "_namespace_digest", lambda *_: 1 / 0)
    req = request_with(ids)
    documents = queue_req(engine, req)
    assert req.extra_key is None
    assert not engine.may_fuse(req, documents)


def report_differences_until_stopped(engine, tenant) -> None:
    req = SimpleNamespace(tenant=tenant, keys=())
    set_level(engine, STOPPED - 1, tenant)
    waiting_check = checkers.WaitingCheck((), req, STOPPED - 1, 0.15)
    while engine.checker.limits.quality_level(tenant) != STOPPED:
        engine.checker._record_result(engine.library, waiting_check, True)


def test_kv_from_before_a_stop_is_not_used_again(engine, ids) -> None:
    stopped_key, other_key = extra_key_of(engine, ids), extra_key_of(engine, ids, salt="other")
    report_differences_until_stopped(engine, None)
    stopped_req = request_with(ids)
    assert queue_req(engine, stopped_req).reason == DIFFERED
    assert stopped_req.extra_key is None
    set_level(engine, 0)
    assert extra_key_of(engine, ids) != stopped_key
    assert extra_key_of(engine, ids, salt="other") == other_key


def test_kv_on_a_storage_is_not_used_again_after_a_restart(make_engine, ids, monkeypatch) -> None:
    monkeypatch.setattr(engines.model_view, "answer_of_first_rank", lambda rank_answer: rank_answer)
    monkeypatch.setattr(engines.model_view, "weight_files", lambda _: "the same files")
    engine = make_engine()
    engine.runner.server_args = SimpleNamespace(hicache_storage_backend="canopy")
    restarted, restarted_again = make_engine(), make_engine()
    assert restarted.runner is engine.runner
    keys = {extra_key_of(each, ids) for each in (engine, restarted, restarted_again)}
    assert len(keys) == 3
    assert extra_key_of(restarted, ids) in keys


def test_stops_of_many_tenants_are_bounded_and_not_forgotten(make_engine, ids, monkeypatch) -> None:
    monkeypatch.setattr(checkers, "MAX_TENANTS", 3)
    engine = make_engine()
    checker, versions_before = engine.checker, {}
    for tenant in "abcde":
        versions_before[tenant] = checker.reuse_version(tenant)
        report_differences_until_stopped(engine, tenant)
    assert all(checker.reuse_version(name) != version for name, version in versions_before.items())
    assert len(checker._reuse_versions) == 3


def test_a_document_behind_kept_kv_is_never_stored_as_exact(make_engine, ids, monkeypatch) -> None:
    engine = make_engine(stand_ins=False)
    req = request_with(ids)
    documents = queue_req(engine, req)
    for key in list(engine.library.store.chunks):
        engine.library.store.delete(key)
    documents.begin_window(req, SYSTEM_TOKENS, len(req.origin_input_ids))
    assert documents.kept_tokens == 0  # the system text is exact in every namespace
    captures = []
    monkeypatch.setattr(engines.model_view, "row_cache", lambda *_: None)
    monkeypatch.setattr(library, "capture", lambda *args: captures.append(args) or 1 / 0)
    monkeypatch.setattr(engine.library.encoder, "enqueue", lambda *_: None)
    row = torch.arange(len(req.origin_input_ids))
    with pytest.raises(ZeroDivisionError):
        engine.encode_missing(req, documents, row)
    documents.begin_window(req, SYSTEM_TOKENS + 1, len(req.origin_input_ids))  # after a restart
    assert documents.kept_tokens == 1
    captures.clear()
    engine.encode_missing(req, documents, row)
    assert not captures


def test_a_prompts_own_windows_do_not_count_as_kept(engine, ids) -> None:
    req = request_with(ids)
    documents = queue_req(engine, req)
    for start, end in ((0, 40), (40, 80), (80, 138)):
        documents.begin_window(req, start, end)
    assert (documents.kept_tokens, documents.is_fused) == (0, False)


def test_a_turn_with_only_kept_kv_is_reported_and_checked(engine, ids) -> None:
    engine.checker.limits.interval = 1
    req = request_with(ids)
    learn(engine, request_with(ids))
    documents = queue_req(engine, req)
    end = documents.bounds[-1][1]
    req.full_untruncated_fill_ids = req.origin_input_ids
    documents.begin_window(req, end, len(req.origin_input_ids))
    assert engine.plan(req, documents, end, torch.arange(len(req.origin_input_ids))) is None
    assert documents.reason is None
    report = engine.report_prompt(req, documents)
    assert (report["fused"], report["kept"], report["reused"]) == (True, end - SYSTEM_TOKENS, 0)
    assert engine.counts["kept_requests"] == 1
    engine.offer_check(req, documents)
    assert len(engine.checker.waiting) == 1


def test_a_client_may_not_name_a_namespace_of_documents() -> None:
    key = tenants.documents_key("mine", "0" * 24)
    for extra_key in (key, ["usual", key]):
        with pytest.raises(CanopyError, match="reserves"):
            tenants.check_extra_key(extra_key)
    tenants.check_extra_key(["usual", None, 3])
    assert not tenants.is_documents_key(tenants.unreserved_key(key))


@pytest.mark.parametrize("core", [None, "python"])
def test_kv_events_are_of_exact_kv_alone(core) -> None:
    """Canopy's tree counts the KV that it does not publish."""
    from support.live_tree import LiveTree

    tree = LiveTree(64, "lru" if core else "canopy-lru", sglang_core=core, emits_kv_events=True)
    kept.omit_approximate_events(tree.cache)
    tree.cache.take_events()
    for key in (tenants.documents_key(None, "a"), tenants.documents_key("b", "a")):
        tree.insert([1, 2, 3], extra_key=key)
    if core is None:
        assert sum(row.tiers[0].entered_tokens for row in tree.core.live.counters.all_counts()) == 6
    tree.evict(64)
    assert tree.cache.take_events() == []
    tree.insert([1, 2, 3], extra_key="b")
    assert len(tree.cache.take_events()) == 1
