"""A prompt that is admitted as fused but computed whole runs in windows, and stays exact."""

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from canopy_documents.fuse.choice import ChosenTokens
from canopy_documents.server import forward as forwards
from canopy_documents.server.batch import split_into_windows
from canopy_documents.server.request import ReusePlan
from canopy_documents.server.scheduler import check_insert
from sglang_canopy.errors import CanopyError
from support.document_engine import learn, prompt, queue_req, request
from support.document_steps import StepWorker, batch_of, extend


def test_rows_with_requested_logits_stay_together() -> None:
    *early, last = split_into_windows([torch.arange(10), torch.arange(6)], 4, [1, 6])
    assert last[1].tolist() == list(range(6))
    assert last[0].tolist() == [9]
    assert all(len(rows) for forward in early for rows in forward)


@given(st.lists(st.integers(1, 40), min_size=1, max_size=6), st.integers(6, 50), st.data())
def test_every_row_is_computed_after_those_before_it(lengths, max_rows, data) -> None:
    chosen_rows = []
    for count in lengths:
        rows = data.draw(st.lists(st.integers(0, 99), min_size=count, max_size=count, unique=True))
        chosen_rows.append(torch.tensor(sorted(rows)))
    windows = split_into_windows(chosen_rows, max_rows, [1] * len(chosen_rows))
    for forward in windows:
        assert sum(map(len, forward)) <= max_rows
        assert all(len(rows) for rows in forward)
    assert len(windows) == 1 or sum(lengths) > max_rows
    for i, rows in enumerate(chosen_rows):
        computed: list[int] = []
        for forward in windows:
            new = [row for row in forward[i].tolist() if row not in computed]
            assert not computed or not new or new[0] > computed[-1] or new == rows[:1].tolist()
            computed += new
        assert sorted(computed) == rows.tolist()
        assert int(windows[-1][i][-1]) == int(rows[-1])


def window_batch(req, start: int, end: int):
    """A batch of one request's window."""
    return extend(batch_of([(start, end)]), req)


@pytest.fixture
def set_up(make_engine, ids, monkeypatch):
    """``set_up()``: an engine with windows of 32 tokens, its worker, and a request whose chunks are stored."""

    def new_setup():
        engine = make_engine()
        prompt_ids, bounds = prompt(ids[:150], (0, 1))
        learn(engine, request(prompt_ids, bounds))
        prompt_ids = prompt_ids[:98]
        req = request(
            prompt_ids, bounds, rid="r", full_untruncated_fill_ids=prompt_ids, customized_info=None,
        )  # fmt: skip
        queue_req(engine, req)
        monkeypatch.setattr(engine, "encode_missing", lambda *_: None)
        table = torch.arange(200).view(2, 100) + 7
        engine.runner.req_to_token_pool = SimpleNamespace(req_to_token=table)
        engine.window_tokens, engine.prefill_tokens = 32, 64
        return engine, StepWorker(engine, monkeypatch), req

    return new_setup


def reuse_all_documents(engine, monkeypatch, failing_start: int = -1) -> None:
    """Replace planning: reuse all stored chunks, and fail in the window that begins at ``failing_start``."""

    def plan(req, request, prefix, row):
        if prefix == failing_start:
            raise CanopyError("damaged")
        placed = tuple(
            chunk
            for document in engine.library.load(request, req.origin_input_ids)
            if (chunk := document.placed_from(prefix))
        )
        computed = torch.ones(len(req.origin_input_ids), dtype=torch.bool)
        for chunk in placed:
            computed[chunk.start : chunk.end] = False
        return ReusePlan(ChosenTokens(computed), placed, prefix)

    def write_reused(plan, row, first, end):
        if first == failing_start:
            raise CanopyError("damaged")

    monkeypatch.setattr(engine, "plan", plan)
    monkeypatch.setattr(engine, "write_reused", write_reused)


@pytest.mark.parametrize("fault", ["planning", "another rank's planning", "packing", "eviction"])
def test_a_prompt_that_cannot_be_fused_is_computed_in_windows_and_stays_exact(
    set_up, monkeypatch, fault
) -> None:
    engine, worker, req = set_up()
    if fault == "eviction":
        for key in list(engine.library.store.chunks):
            engine.library.store.delete(key)
    else:
        reuse_all_documents(engine, monkeypatch, failing_start=0 if fault == "planning" else -1)
    if fault == "another rank's planning":
        monkeypatch.setattr(engine.library, "model", SimpleNamespace(ranks=object()))
        monkeypatch.setattr(forwards, "on_any_rank", lambda failed, _most: sorted({*failed, 0}))
    original_pack_rows, packed = forwards.pack_rows, []

    def pack_rows(batch, table, chosen, arrivals=()):
        packed.append(chosen)
        assert fault != "packing" or len(packed) > 1, "the fused rows"
        return original_pack_rows(batch, table, chosen)

    monkeypatch.setattr(forwards, "pack_rows", pack_rows)
    worker.forward(window_batch(req, 0, 98))
    assert [len(rows) for rows, _ in worker.forwards] == [32, 32, 2, 32]
    assert [is_sampled for _, is_sampled in worker.forwards] == [False, False, False, True]
    assert [position for rows, _ in worker.forwards for position in rows] == list(range(98))
    assert not req.canopy.documents.is_fused
    (report,) = req.customized_info["canopy_documents"]
    assert not report["fused"]
    assert engine.counts["most_rows"] == 32
    assert engine.counts["split_batches"] == 1
    if fault == "planning":
        assert report == {"fused": False, "why": "planning failed"}
    if fault == "eviction":
        assert report["why"] == "too few of its documents are stored"


def test_without_chunked_prefill_a_single_prompt_runs_in_one_batch(set_up, monkeypatch) -> None:
    engine, worker, req = set_up()
    engine.window_tokens = None
    reuse_all_documents(engine, monkeypatch, failing_start=0)
    worker.forward(window_batch(req, 0, 98))
    assert [len(rows) for rows, _ in worker.forwards] == [98]


def test_a_failed_later_window_inserts_no_reused_kv_into_the_exact_tree(set_up, monkeypatch):
    engine, worker, req = set_up()
    reuse_all_documents(engine, monkeypatch, failing_start=60)
    for start, end in ((0, 60), (60, 80), (80, 98)):
        worker.forward(window_batch(req, start, end))
    assert req.canopy.documents.is_fused
    check_insert(None, req)
    req.extra_key = None  # as if the request were matched with exact ones
    with pytest.raises(RuntimeError, match="would enter the exact prefix tree"):
        check_insert(None, req)
    assert worker.forwards[-2][0] == list(range(20))  # SGLang's own forward
    assert engine.counts["fallbacks"] == 1


def test_a_fused_request_computes_only_the_other_rows_and_stays_apart(set_up, monkeypatch) -> None:
    engine, worker, req = set_up()
    reuse_all_documents(engine, monkeypatch)
    worker.forward(window_batch(req, 0, 98))
    ((rows, _),) = worker.forwards
    assert len(rows) == 98 - 80
    assert req.canopy.documents.is_fused
    assert req.canopy.documents.is_apart(req)


def test_the_next_request_is_reported_although_a_chunk_could_not_be_encoded(set_up, monkeypatch):
    engine, _, first = set_up()
    second = request(first.origin_input_ids, [0, 40], rid="s", customized_info=None)
    queue_req(engine, second)

    def encode_missing(r, *_):
        if r is first:
            raise OSError("damaged")

    monkeypatch.setattr(engine, "encode_missing", encode_missing)
    batch = batch_of([(0, 98), (0, 98)])
    batch.reqs = [first, second]
    forwards._finish_prompts(engine, batch, 0)
    assert [bool(r.customized_info["canopy_documents"]) for r in (first, second)] == [True, True]
    assert engine.counts["fallbacks"] == 1
