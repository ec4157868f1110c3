"""The reuse reported in an answer equals the actual reuse, even if it differs from the plan."""

import pytest

from sglang_canopy.errors import CanopyError
from support.document_engine import LENGTH, SYSTEM
from support.document_steps import Worker, batch_of, extend, pool_engine, run_step, step_of

WINDOW = 60


@pytest.mark.parametrize("selector", ["question", "frequency"])
def test_tokens_not_reused_in_a_later_window_are_not_reported(
    llama, ids, chunks, monkeypatch, selector
) -> None:
    engine = pool_engine(llama, monkeypatch, lambda x: x, selector=selector)
    monkeypatch.setattr(engine, "encode_missing", lambda *_: None)
    req, first, row = step_of(engine, ids, chunks, lambda x: x, window=WINDOW)
    (rows,) = run_step(engine, first, monkeypatch)
    reused, total = WINDOW - len(rows), len(req.origin_input_ids)
    assert 0 < reused <= WINDOW - SYSTEM

    def raise_damaged(*_):
        raise CanopyError("damaged")

    monkeypatch.setattr(engine, "write_reused", raise_damaged)
    last = batch_of([(WINDOW, total)])
    last.out_cache_loc = row[WINDOW:].clone()
    Worker(engine, monkeypatch).forward(extend(last, req))
    req.canopy.documents.finish_report()  # as before its KV is released
    (report,) = req.customized_info["canopy_documents"]
    assert report["fused"]
    assert report["reused"] == report["reused_host"] == reused
    assert report["recomputed"] == 3 * LENGTH - reused
    assert report["computed"] == total - reused
    assert engine.counts["reused_tokens"] == report["reused"]
    assert engine.counts["recomputed_tokens"] == report["recomputed"]
