"""A fused step never waits for the device, and its choices and placements equal those on a CPU."""

from types import SimpleNamespace

import pytest
import torch

from canopy_documents.server.engine import DocumentEngine
from support.document_engine import prompt, register_head, request
from support.document_steps import check_kv, move_model, pool_engine, run_step, set_up, use_torch
from support.separate_device import DEVICE, HostSync, SeparateDevice, unwrap


@pytest.mark.parametrize("selector", ["question", "frequency"])
def test_a_fused_step_waits_for_nothing(llama, ids, chunks, monkeypatch, selector) -> None:
    cpu_engine = pool_engine(llama, monkeypatch, lambda x: x, selector=selector)
    req, batch, _ = set_up(cpu_engine, ids, chunks, lambda x: x)
    (expected_rows,) = run_step(cpu_engine, batch, monkeypatch)
    device = SeparateDevice()
    use_torch(monkeypatch)
    engine = pool_engine(move_model(llama, device), monkeypatch, device.put, selector=selector)
    with device:
        device_req, batch, row = set_up(engine, ids, chunks, device.put)
        (rows,) = run_step(engine, batch, monkeypatch)
    assert engine.counts["fallbacks"] == 0
    assert device_req.canopy.documents.is_fused
    assert unwrap(rows).tolist() == expected_rows.tolist()
    reused = torch.ones(len(row), dtype=torch.bool)
    reused[expected_rows] = False
    check_kv(engine, cpu_engine, row[reused])
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
    prompt_ids, bounds = prompt(ids)

    def encode_documents(engine: DocumentEngine, to_device) -> list[tuple[str, ...]]:
        req = request(prompt_ids, bounds)
        state = engine.new_request(req)
        register_head(engine, state)
        engine.encode_missing(req, state, to_device(torch.arange(5, 5 + len(prompt_ids))))
        while engine.has_idle_work:
            engine.work_when_idle()
        assert engine.library.failures == 0
        assert engine.library.encoder.encoded_chunks == 3
        return state.keys

    def identity(x):
        return x

    cpu_engine = pool_engine(llama, monkeypatch, identity, selector=selector)
    expected_keys = encode_documents(cpu_engine, identity)
    use_torch(monkeypatch)
    device = SeparateDevice()
    with device:  # the store's own tensors too
        engine = pool_engine(move_model(llama, device), monkeypatch, device.put, selector=selector)
        assert encode_documents(engine, device.put) == expected_keys
    for key, *_ in expected_keys:
        chunk, expected = (each.library.store.chunks.get(key) for each in (engine, cpu_engine))
        for stored_kv, expected_kv in ((chunk.raw_k, expected.raw_k), (chunk.v, expected.v)):
            torch.testing.assert_close(unwrap(stored_kv), expected_kv, atol=2e-5, rtol=1e-4)
        assert list(chunk.scores) == list(expected.scores)
        for name in expected.scores:
            torch.testing.assert_close(chunk.scores[name], expected.scores[name])


def test_the_emulated_device_raises_when_the_host_waits() -> None:
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
        assert unwrap(x + 1).tolist() == [1, 2, 3, 4]
        torch.ones(2).to(DEVICE, non_blocking=True)
    assert device.copied_bytes == {"to device": 8}


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_detects_no_wait_in_a_fused_step(llama, ids, chunks, monkeypatch) -> None:
    def to_device(x):
        return x.cuda() if isinstance(x, torch.Tensor) else x

    engine = pool_engine(move_model(llama, SimpleNamespace(put=to_device)), monkeypatch, to_device)
    for sync_mode in ("default", "error"):  # the first step compiles kernels, which waits
        req, batch, _ = set_up(engine, ids, chunks, to_device)
        torch.cuda.set_sync_debug_mode(sync_mode)
        try:
            run_step(engine, batch, monkeypatch)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert engine.counts["fallbacks"] == 0
    assert req.canopy.documents.is_fused
