"""The attention of a fused batch's rows, and the arguments of stock kernels."""

import sys
import types

import pytest

torch = pytest.importorskip("torch")

from canopy_kernel import attention, decomposition, stock_kernels  # noqa: E402

BF16 = torch.bfloat16


def choice(name, backend=None, dim=128, dtype=BF16, pool=BF16, device="cuda", chip=90):
    return stock_kernels.choose(name, backend, dim, dtype, pool, device, chip)


def test_the_server_s_backend_decides():
    backend = types.SimpleNamespace(flash_attn_with_kvcache=print)
    assert isinstance(choice("fa3", backend).paged, stock_kernels.FlashAttentionPaged)
    assert choice("triton").paged is None
    assert "triton" in choice("triton").reason


def test_triton_alone_is_the_fallback_with_a_reason(monkeypatch):
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    assert "cannot be imported" in choice("flashinfer").reason
    assert "flash_attn_with_kvcache" in choice("fa3", types.SimpleNamespace()).reason
    assert "96" in choice("fa3", dim=96).reason
    assert "float8" in choice("fa3", pool=torch.float8_e4m3fn).reason
    assert "cpu" in choice("fa3", device="cpu").reason


def test_blocks_fill_the_tiles_of_the_kernel_that_runs_them(monkeypatch):
    monkeypatch.setitem(sys.modules, "flashinfer", types.SimpleNamespace())
    assert [choice("flashinfer", dim=d).paged.block for d in (64, 128, 256)] == [192, 128, 128]
    assert choice("flashinfer", chip=80).paged.block == decomposition.BLOCK
    fa3 = types.SimpleNamespace(flash_attn_with_kvcache=None)
    fa3.flash_attn_with_kvcache = lambda **given: seen.append(given) or 1 / 0
    assert choice("fa3", fa3).paged.block == 64
    seen = []
    q, k, v, _ = rows_and_pools()
    rows = attention.Rows.one(torch.arange(5) * 2, torch.arange(60))
    for block, blocks in ((2, 3), (4, 2)):
        paged = stock_kernels.FlashAttentionPaged(fa3.flash_attn_with_kvcache, block)
        with pytest.raises(ZeroDivisionError):
            decomposition.decomposed(q, k, v, rows, 0.25, paged)
        assert len(seen[-1]["cache_seqlens"]) == blocks


def rows_and_pools():
    torch.manual_seed(1)
    rows = attention.Rows(
        torch.tensor([2, 5, 9, 0, 30]),
        torch.tensor([0, 3, 5], dtype=torch.int32),
        torch.randperm(60)[:43],
        torch.tensor([0, 12, 43], dtype=torch.int32),
        3,
    )
    k, v = (torch.randn(60, 1, 2, 16) for _ in range(2))
    return torch.randn(5, 4, 16), k, v, rows


def test_fa3_is_called_as_sglang_s_backend_calls_it():
    """A stand-in with the parameters of SGLang's function, and FA3's contract."""
    q, k, v, rows = rows_and_pools()

    def attend(
        q, k_cache, v_cache, page_table, cache_seqlens, cu_seqlens_q, max_seqlen_q,
        softmax_scale, causal, return_softmax_lse,
    ):  # fmt: skip
        assert not causal
        assert return_softmax_lse
        assert page_table.dtype == cache_seqlens.dtype == cu_seqlens_q.dtype == torch.int32
        cut = decomposition.blocks(rows, 1, max_seqlen_q)
        chosen = list(zip(page_table, cache_seqlens.tolist()))
        out, lse = decomposition._attend_pages(q, k_cache, v_cache, cut, chosen, softmax_scale)
        return out, lse.T.contiguous()

    paged = stock_kernels.FlashAttentionPaged(attend)
    got = decomposition.decomposed(q, k, v, rows, 0.25, paged, 2)
    assert torch.allclose(got, attention.reference(q, k, v, rows, 0.25), atol=1e-5)


def planned_lengths(starts, last_page, page_size):
    """Return the keys of each request by FlashInfer's planner (``get_seq_lens``). It reads ``last_page``
    of requests without pages too; only 0 means no key."""
    return (starts.diff() - 1).clamp(min=0) * page_size + last_page


def test_the_stand_in_follows_the_vendors_rule():
    page = pytest.importorskip("flashinfer.page", exc_type=ImportError)
    starts, last = torch.tensor([0, 0, 1, 3]), torch.tensor([0, 5, 16])
    mine = planned_lengths(starts, last, 16)
    assert torch.equal(mine, page.get_seq_lens(starts, last, 16))


class Wrapper:
    """FlashInfer's wrapper over its planner's lengths; every plan is counted."""

    plans = 0

    def __init__(self, workspace, layout):
        assert layout == "NHD"

    def plan(
        self, qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len,
        num_qo_heads, num_kv_heads, head_dim_qk, page_size,
        causal, sm_scale, q_data_type, kv_data_type,
    ):  # fmt: skip
        assert not causal
        assert (num_qo_heads, num_kv_heads, head_dim_qk) == (4, 2, 16)
        keys = planned_lengths(paged_kv_indptr, paged_kv_last_page_len, page_size)
        assert (keys <= paged_kv_indptr.diff() * page_size).all(), "read past the list of pages"
        starts = paged_kv_indptr.tolist()
        assert starts[-1] == len(paged_kv_indices)
        Wrapper.plans += 1
        self.scale, self.query_starts = sm_scale, qo_indptr
        self.chosen = [
            (paged_kv_indices[a:b], n) for a, b, n in zip(starts, starts[1:], keys.tolist())
        ]

    def run(self, q, pools, return_lse):
        cut = types.SimpleNamespace(query_starts=self.query_starts)
        out, lse = decomposition._attend_pages(q, *pools, cut, self.chosen, self.scale)
        return out, lse / torch.log(torch.tensor(2.0))


def test_flashinfer_is_planned_once_for_all_layers(monkeypatch):
    module = types.SimpleNamespace(BatchPrefillWithPagedKVCacheWrapper=Wrapper)
    monkeypatch.setitem(sys.modules, "flashinfer", module)
    monkeypatch.setattr(Wrapper, "plans", 0)
    q, k, v, rows = rows_and_pools()
    workspace = torch.empty(1)
    paged = choice("flashinfer", types.SimpleNamespace(workspace_buffer=workspace)).paged
    assert paged.workspace is workspace
    for _layer in range(3):
        got = decomposition.decomposed(q, k, v, rows, 0.25, paged, 2)
        assert torch.allclose(got, attention.reference(q, k, v, rows, 0.25), atol=1e-5)
    assert Wrapper.plans == 1
    decomposition.decomposed(q, k, v, rows_and_pools()[3], 0.25, paged, 2)
    assert Wrapper.plans == 2


def test_the_real_wrapper_has_the_parameters_used():
    """Compare with FlashInfer if it is installed, and with SGLang's FA3 function."""
    import inspect

    flashinfer = pytest.importorskip("flashinfer", exc_type=ImportError)
    plan = inspect.signature(flashinfer.BatchPrefillWithPagedKVCacheWrapper.plan).parameters
    wanted = inspect.signature(Wrapper.plan).parameters
    assert set(wanted) <= set(plan)
    assert list(plan)[1:9] == list(wanted)[1:9]


def test_sglang_s_fa3_function_has_the_parameters_used():
    from pathlib import Path

    sglang = pytest.importorskip("sglang")
    source = Path(sglang.__path__[0]) / "kernels/ops/attention/flash_attention_v3.py"
    said = source.read_text().split("def flash_attn_with_kvcache(", 1)[1].split("):", 1)[0]
    for name in (
        "k_cache", "v_cache", "page_table", "cache_seqlens", "cu_seqlens_q", "max_seqlen_q",
        "softmax_scale", "causal", "return_softmax_lse",
    ):  # fmt: skip
        assert f"{name}=" in said or f"{name}," in said or f"{name}:" in said, name
