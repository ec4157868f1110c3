"""Time the attention of an 8B-shaped layer: our kernels, stock kernels and the roofline floor."""

# ruff: noqa: B023 - every closure here runs within its iteration
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from device_timing import Bench, against_peaks  # in this folder

from canopy_kernel import attention, decomposition, floors, stock_kernels
from canopy_kernel.floors import Cost, Heads

SHAPE = Heads(32, 8, 128, 2)


def fa3() -> Callable[..., Any] | None:
    """Return FA3's paged attention from sgl-kernel, or None if it cannot be imported."""
    try:
        from sgl_kernel.flash_attn import flash_attn_with_kvcache
    except Exception:  # missing, a stub, or built for another torch
        return None
    return flash_attn_with_kvcache


def stock_ways(b: Bench) -> dict[str, decomposition.Paged]:
    """Return the paged kernels available on this machine; ``torch`` in a smoke run."""
    if b.smoke:
        return {"torch": decomposition.paged_torch}
    ways: dict[str, decomposition.Paged] = {}
    types = (torch.bfloat16, torch.bfloat16)
    choice = stock_kernels.choose("flashinfer", None, 128, *types, "cuda", b.capability)
    if choice.paged is not None:
        ways["flashinfer"] = choice.paged
    attend = fa3()
    if attend is not None and b.capability == 90:
        ways["fa3"] = stock_kernels.FlashAttentionPaged(attend)
    return ways


def attention_costs(rows: list[list[int]], length: int) -> tuple[Cost, dict[str, Cost]]:
    """Return the floor of sparse rows over a prompt, and the costs of each of our kernels."""
    size = decomposition.block_size([len(rows[0])], [length], 1)
    return floors.attention_floor(rows, [length], SHAPE), {
        "triton": floors.attention_tiles(rows, [length], SHAPE),
        "decomposed": floors.attention_decomposed(rows, SHAPE, size),
    }


def attention_times(b: Bench, top: dict, lengths: list[int], ratios: list[float]) -> list[dict]:
    """Time each sparse prefill kernel, masked SDPA and the stock kernels' dense causal prefill."""
    heads, kv_heads, dim = SHAPE.heads, SHAPE.kv_heads, SHAPE.dim
    found, scale = [], dim**-0.5
    for n in lengths:
        k, v = b.random(n, 1, kv_heads, dim), b.random(n, 1, kv_heads, dim)
        slots = torch.arange(n, device=b.device)
        dense = _dense(b, top, k, v)
        for ratio in ratios:
            m = int(n * ratio)
            host = torch.randperm(n)[:m].sort()[0]
            rows = attention.Rows.one(host.to(b.device), slots)
            q = b.random(m, heads, dim)
            floor, ways = attention_costs([host.tolist()], n)
            row: dict[str, Any] = {"tokens": n, "ratio": ratio}
            run = attention.sparse_prefill_triton
            seconds = b.time(lambda: run(q, k, v, rows, scale))
            row.update(against_peaks("triton", seconds, ways["triton"], floor, top))
            for name, paged in stock_ways(b).items():
                # The blocks are planned once for all layers, so this time excludes planning.
                seconds = b.time(lambda: decomposition.decomposed(q, k, v, rows, scale, paged))
                row.update(against_peaks(name, seconds, ways["decomposed"], floor, top))
            if m * n <= 2e8:  # a dense mask of queries x keys
                mask = torch.arange(n, device=b.device) <= rows.positions[:, None]
                args = [x[:, 0].transpose(0, 1)[None] for x in (k, v)]
                query = q.transpose(0, 1)[None]
                row["masked_sdpa_s"] = b.time(
                    lambda: F.scaled_dot_product_attention(
                        query, *args, attn_mask=mask, enable_gqa=True
                    )
                )
                del mask
            row.update(dense)
            found.append(row)
    return found


def _dense(b: Bench, top: dict, k: torch.Tensor, v: torch.Tensor) -> dict:
    """Full causal prefill of the same layer by stock attention: torch's, FlashInfer's, FA3's."""
    n = len(k)
    q = b.random(n, SHAPE.heads, SHAPE.dim)
    args = [x[:, 0].transpose(0, 1)[None] for x in (k, v)]
    query = q.transpose(0, 1)[None]
    pairs = n * (n + 1) / 2
    moved = 2.0 * SHAPE.itemsize * n * SHAPE.dim * (SHAPE.heads + SHAPE.kv_heads)
    floor = Cost(4.0 * SHAPE.heads * SHAPE.dim * pairs, moved)

    def beside(name: str, work: Callable[[], object]) -> dict:
        return against_peaks(name, b.time(work, 3), floor, floor, top)

    out = beside(
        "dense_sdpa",
        lambda: F.scaled_dot_product_attention(query, *args, is_causal=True, enable_gqa=True),
    )
    ways = stock_ways(b)
    if "flashinfer" in ways:
        import flashinfer

        out |= beside(
            "dense_flashinfer",
            lambda: flashinfer.single_prefill_with_kv_cache(q, k[:, 0], v[:, 0], causal=True),
        )
    if "fa3" in ways:
        pages = torch.arange(n, dtype=torch.int32, device=b.device)[None]
        ends = torch.tensor([0, n], dtype=torch.int32, device=b.device)
        out |= beside(
            "dense_fa3",
            lambda: fa3()(
                q=q,
                k_cache=k,
                v_cache=v,
                page_table=pages,
                cache_seqlens=ends[1:],
                cu_seqlens_q=ends,
                max_seqlen_q=n,
                causal=True,
            ),
        )
    return out
