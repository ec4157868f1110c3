"""A fused step never waits for the device, and its choices and placements equal those on a CPU."""

from types import SimpleNamespace

import pytest
import torch

from canopy_documents.server.engine import DocumentEngine
from support.document_engine import know_head, prompt, request
from support.document_steps import kernels_on, moved, run, same_kv, served, step_of
from support.separate_device import DEVICE, HostSync, SeparateDevice, inside


@pytest.mark.parametrize("selector", ["question", "frequency"])
def test_a_fused_step_waits_for_nothing(llama, ids, chunks, monkeypatch, selector) -> None:
    plain = served(llama, monkeypatch, lambda x: x, selector=selector)
    req, batch, _ = step_of(plain, ids, chunks, lambda x: x)
    (want,) = run(plain, batch, monkeypatch)
    device = SeparateDevice()
    kernels_on(monkeypatch)
    engine = served(moved(llama, device), monkeypatch, device.put, selector=selector)
    with device:
        device_req, batch, row = step_of(engine, ids, chunks, device.put)
        (rows,) = run(engine, batch, monkeypatch)
    assert engine.counts["fallbacks"] == 0
    assert device_req.canopy.documents.fused
    assert inside(rows).tolist() == want.tolist()
    reused = torch.ones(len(row), dtype=torch.bool)
    reused[want] = False
    same_kv(engine, plain, row[reused])
    (report,) = device_req.customized_info["canopy_documents"]
    (expected,) = req.customized_info["canopy_documents"]
    with device:  # when the forward is done, before the answer is sent
        device_req.canopy.documents.finish_report()
    assert report["reused"] == report["reused_host"] == expected["reused_host"]
    assert report["recomputed"] == expected["recomputed"]


@pytest.mark.parametrize("selector", ["question", "frequency"])
def test_encoding_waits_for_nothing(llama, ids, monkeypatch, selector) -> None:
    """After a normal prefill the first document is taken from the pool, and the others are encoded piece
    by piece, scored and stored."""
    out, bounds = prompt(ids)

    def encoded(engine: DocumentEngine, put) -> list[tuple[str, ...]]:
        req = request(out, bounds)
        state = engine.new_request(req)
        know_head(engine, state)
        engine.encode_missing(req, state, put(torch.arange(5, 5 + len(out))))
        while engine.has_idle_work:
            engine.work_when_idle()
        assert engine.library.failures == 0
        assert engine.library.encoder.encoded_chunks == 3
        return state.keys

    def keep(x):
        return x

    plain = served(llama, monkeypatch, keep, selector=selector)
    wanted = encoded(plain, keep)
    kernels_on(monkeypatch)
    device = SeparateDevice()
    with device:  # the store's own tensors too
        engine = served(moved(llama, device), monkeypatch, device.put, selector=selector)
        assert encoded(engine, device.put) == wanted
    for key, *_ in wanted:
        mine, theirs = (e.library.store.chunks.get(key) for e in (engine, plain))
        for a, b in ((mine.raw_k, theirs.raw_k), (mine.v, theirs.v)):
            torch.testing.assert_close(inside(a), b, atol=2e-5, rtol=1e-4)
        assert list(mine.scores) == list(theirs.scores)
        for name in theirs.scores:
            torch.testing.assert_close(mine.scores[name], theirs.scores[name])


def test_the_device_of_these_tests_refuses_to_be_waited_for() -> None:
    device = SeparateDevice()
    x = device.put(torch.arange(4))
    waits = [
        lambda: int(x[0]), lambda: bool(x[0]), lambda: x[0].item(), lambda: x.cpu(),
        lambda: x[x > 1], lambda: x.nonzero(), lambda: torch.equal(x, x), lambda: x.unique(),
        lambda: torch.ones(2).to(DEVICE), lambda: torch.tensor([1], device=DEVICE),
        lambda: x[torch.tensor([1])],
    ]  # fmt: skip
    with device:
        for wait in waits:
            with pytest.raises(HostSync):
                wait()
        for wait in (x.tolist, x.numpy):
            with pytest.raises(RuntimeError, match="not supported"):
                wait()
        assert inside(x + 1).tolist() == [1, 2, 3, 4]
        torch.ones(2).to(DEVICE, non_blocking=True)
    assert device.copied == {"to device": 8}


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_itself_sees_no_wait_in_a_fused_step(llama, ids, chunks, monkeypatch) -> None:
    def put(x):
        return x.cuda() if isinstance(x, torch.Tensor) else x

    there = SimpleNamespace(put=put)
    engine = served(moved(llama, there), monkeypatch, put)
    for mode in ("default", "error"):  # the first step compiles kernels, which waits
        req, batch, _ = step_of(engine, ids, chunks, put)
        torch.cuda.set_sync_debug_mode(mode)
        try:
            run(engine, batch, monkeypatch)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert engine.counts["fallbacks"] == 0
    assert req.canopy.documents.fused
