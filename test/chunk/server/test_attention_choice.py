"""Fused batches attend by position on any of the server's backends; others run the stock code."""

from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("sglang")

from canopy_chunks.server import attention as server_attention  # noqa: E402
from canopy_kernel import attention  # noqa: E402


def backend_and_batch():
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

    backend = server_attention._fusing("fa3", create)(SimpleNamespace())
    slots = torch.randperm(64)[:50]
    rows = attention.Rows.single(torch.tensor([3, 4, 20, 49]), slots)
    layer = SimpleNamespace(tp_q_head_num=4, qk_head_dim=16, layer_id=0, scaling=0.25)
    q = torch.randn(4, 64)
    expected = attention.reference(q.view(4, 4, 16), keys[:, None], values[:, None], rows, 0.25)
    return backend, rows, layer, q, expected.reshape(4, 64)


def test_a_batch_without_a_plan_uses_stock_attention():
    backend, _, layer, q, _ = backend_and_batch()
    assert backend.forward_extend(q, None, None, layer, None) == "stock"


def test_a_fused_batch_attends_by_position():
    backend, rows, layer, q, expected = backend_and_batch()
    backend.canopy.plan = server_attention.FusedAttention(rows)
    for _ in range(2):  # the second layer reuses the plan
        got = backend.forward_extend(q, None, None, layer, None)
        assert torch.allclose(got, expected, atol=1e-5)


def test_a_backend_that_cannot_fuse_is_refused_with_those_that_can():
    from types import SimpleNamespace

    from canopy_chunks.server.engine import ChunkEngine
    from sglang_canopy.errors import CanopyError

    with pytest.raises(CanopyError, match="torch_native on a CPU, or fa3, flashinfer or triton"):
        ChunkEngine(SimpleNamespace(attn_backend=object()), None)
