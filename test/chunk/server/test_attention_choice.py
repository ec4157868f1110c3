"""Fused batches with a server's backend: its own paged kernel if it has one, stated in the log."""

import logging
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("sglang")

from canopy_chunks.server import attention as server_attention  # noqa: E402
from canopy_kernel import attention, decomposition, stock_kernels, ways  # noqa: E402


def backend_and_batch(page_size=1):
    """A backend as ``register`` makes it, over a pool of single tokens, and a fused batch."""
    torch.manual_seed(0)
    keys, values = torch.randn(64, 2, 16), torch.randn(64, 2, 16)
    pool = SimpleNamespace(
        get_key_buffer=lambda _: keys,
        get_value_buffer=lambda _: values,
        set_kv_buffer=lambda *_: pytest.fail("this batch saves nothing"),
    )

    def create(runner):
        def stock(*args, **kwargs):
            return "stock"

        return SimpleNamespace(forward_extend=stock, token_to_kv_pool=pool)

    backend = server_attention._fusing("fa3", create)(SimpleNamespace(page_size=page_size))
    order = torch.randperm(64 // page_size)[:, None] * page_size + torch.arange(page_size)
    slots = order.flatten()[:50]
    rows = attention.Rows.one(torch.tensor([3, 4, 20, 49]), slots)
    layer = SimpleNamespace(tp_q_head_num=4, qk_head_dim=16, layer_id=0, scaling=0.25)
    q = torch.randn(4, 64)
    expected = attention.reference(q.view(4, 4, 16), keys[:, None], values[:, None], rows, 0.25)
    return backend, rows, layer, q, expected.reshape(4, 64)


def test_a_batch_without_a_plan_uses_stock_attention():
    backend, _, layer, q, _ = backend_and_batch()
    assert backend.forward_extend(q, None, None, layer, None) == "stock"
    assert backend.canopy_choice is None


def test_the_choice_is_made_once_and_logged(caplog):
    backend, rows, layer, q, expected = backend_and_batch()
    backend.canopy_plan = server_attention.FusedAttention(rows)
    with caplog.at_level(logging.INFO):
        for _ in range(2):
            got = backend.forward_extend(q, None, None, layer, None)
            assert torch.allclose(got, expected, atol=1e-5)
    (said,) = [r.getMessage() for r in caplog.records if "attend through" in r.getMessage()]
    assert "torch: the device is cpu" in said


@pytest.mark.parametrize("page_size", [1, 16])
def test_a_chosen_stock_kernel_computes_the_prefix_of_each_block(page_size):
    backend, rows, layer, q, expected = backend_and_batch(page_size)
    seen = []

    def paged(q, k_pool, v_pool, blocks, scale):
        seen.append((k_pool.shape[1], blocks.prefixes.tolist()))
        return decomposition.paged_torch(q, k_pool, v_pool, blocks, scale)

    backend.canopy_choice = stock_kernels.Choice(paged, "a test")
    backend.canopy_plan = server_attention.FusedAttention(rows)
    got = backend.forward_extend(q, None, None, layer, None)
    assert torch.allclose(got, expected, atol=1e-5)
    assert seen == [(page_size, [3])]


@pytest.mark.parametrize(("triton_ms", "asked"), [(1.0, 0), (9.0, 1)])
def test_triton_alone_runs_if_measured_to_be_faster(monkeypatch, triton_ms, asked):
    backend, rows, layer, q, expected = backend_and_batch(16)
    measured = ways.Measured("A chip", 4096, 0.15, {"triton": triton_ms, "fa3": 2.0})
    monkeypatch.setattr(ways, "table", lambda: (measured,))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "A chip")
    seen = []

    def paged(*about):
        seen.append(about)
        return decomposition.paged_torch(*about)

    backend.canopy_name = "fa3"
    backend.canopy_choice = stock_kernels.Choice(paged, "a test")
    backend.canopy_plan = server_attention.FusedAttention(rows)
    got = backend.forward_extend(q, None, None, layer, None)
    assert torch.allclose(got, expected, atol=1e-5)
    assert len(seen) == asked


def test_a_backend_that_cannot_fuse_is_refused_with_those_that_can():
    from types import SimpleNamespace

    from canopy_chunks.server.engine import ChunkEngine
    from sglang_canopy.errors import CanopyError

    with pytest.raises(CanopyError, match="torch_native on a CPU, or fa3, flashinfer or triton"):
        ChunkEngine(SimpleNamespace(attn_backend=object()), None)
