"""The reuse reported in an answer equals the actual reuse, even if it differs from the plan."""

import pytest

from sglang_canopy.errors import CanopyError
from support.document_engine import DOCUMENT_TOKENS, SYSTEM_TOKENS
from support.document_steps import StepWorker, batch_of, extend, pool_engine, run_step, set_up

WINDOW_TOKENS = 60


@pytest.mark.parametrize("selector", ["question", "frequency"])
def test_tokens_not_reused_in_a_later_window_are_not_reported(
    llama, ids, chunks, monkeypatch, selector
) -> None:
    engine = pool_engine(llama, monkeypatch, lambda x: x, selector=selector)
    monkeypatch.setattr(engine, "encode_missing", lambda *_: None)
    req, first_batch, row = set_up(engine, ids, chunks, lambda x: x, window=WINDOW_TOKENS)
    (computed_rows,) = run_step(engine, first_batch, monkeypatch)
    reused_tokens, prompt_tokens = WINDOW_TOKENS - len(computed_rows), len(req.origin_input_ids)
    assert 0 < reused_tokens <= WINDOW_TOKENS - SYSTEM_TOKENS

    def raise_damaged(*_):
        raise CanopyError("damaged")

    monkeypatch.setattr(engine, "write_reused", raise_damaged)
    last_batch = batch_of([(WINDOW_TOKENS, prompt_tokens)])
    last_batch.out_cache_loc = row[WINDOW_TOKENS:].clone()
    StepWorker(engine, monkeypatch).forward(extend(last_batch, req))
    req.canopy.documents.finish_report()  # as before its KV is released
    (report,) = req.customized_info["canopy_documents"]
    assert report["fused"]
    assert report["reused"] == report["reused_host"] == reused_tokens
    assert report["recomputed"] == 3 * DOCUMENT_TOKENS - reused_tokens
    assert report["computed"] == prompt_tokens - reused_tokens
    assert engine.counts["reused_tokens"] == report["reused"]
    assert engine.counts["recomputed_tokens"] == report["recomputed"]
