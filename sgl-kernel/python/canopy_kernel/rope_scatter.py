"""Rope-scatter: reused K and V from a chunk's rows to the paged pool, keys rotated on the way.

One pass reads each row once and writes it once: the floor is two reads and two writes a token.
"""

from __future__ import annotations

import torch

from canopy_kernel import pages
from canopy_kernel.triton_shim import tl, triton


def reference(
    raw_k: torch.Tensor,
    v: torch.Tensor,
    source: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    table: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
) -> None:
    """Plain torch.

    raw_k, v: ``[rows, kv_heads, d]`` (keys before RoPE); source: ``[n]`` row to take; positions:
    ``[n]`` new position; slots: ``[n]`` where it goes; table: ``[positions, d]`` fp32 cos then
    sin (SGLang's ``cos_sin_cache``); pools: views ``[pages, page_size, kv_heads, d]``, written.
    """
    x = raw_k[source.long()].float()
    cos, sin = table[positions.long()].float()[:, None].chunk(2, dim=-1)
    half = cos.shape[-1]
    a, b = x[..., :half], x[..., half:]
    pages.write(k_pool, slots, torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1))
    pages.write(v_pool, slots, v[source.long()])


@triton.jit
def _rope_scatter_kernel(
    raw_k_ptr,
    v_ptr,
    source_ptr,
    positions_ptr,
    slots_ptr,
    table_ptr,
    k_pool_ptr,
    v_pool_ptr,
    count,
    k_row,
    v_row,
    kp_page,
    kp_token,
    kp_head,
    vp_page,
    vp_token,
    vp_head,
    PAGE: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK: tl.constexpr,
):
    head = tl.program_id(1)
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    alive = token < count
    source = tl.load(source_ptr + token, mask=alive, other=0).to(tl.int64)
    position = tl.load(positions_ptr + token, mask=alive, other=0).to(tl.int64)
    slot = tl.load(slots_ptr + token, mask=alive, other=0).to(tl.int64)
    HALF: tl.constexpr = DIM // 2
    dims = tl.arange(0, HALF)
    both = alive[:, None]
    read = source[:, None] * k_row + head * DIM + dims[None, :]
    a = tl.load(raw_k_ptr + read, mask=both, other=0.0).to(tl.float32)
    b = tl.load(raw_k_ptr + read + HALF, mask=both, other=0.0).to(tl.float32)
    angle = position[:, None] * DIM + dims[None, :]
    cos = tl.load(table_ptr + angle, mask=both, other=0.0).to(tl.float32)
    sin = tl.load(table_ptr + angle + HALF, mask=both, other=0.0).to(tl.float32)
    page = slot // PAGE
    offset = slot % PAGE
    out = (page * kp_page + offset * kp_token)[:, None] + head * kp_head + dims[None, :]
    kind = k_pool_ptr.dtype.element_ty
    tl.store(k_pool_ptr + out, (a * cos - b * sin).to(kind), mask=both)
    tl.store(k_pool_ptr + out + HALF, (b * cos + a * sin).to(kind), mask=both)
    read = source[:, None] * v_row + head * DIM + dims[None, :]
    out = (page * vp_page + offset * vp_token)[:, None] + head * vp_head + dims[None, :]
    low = tl.load(v_ptr + read, mask=both, other=0.0)
    high = tl.load(v_ptr + read + HALF, mask=both, other=0.0)
    kind = v_pool_ptr.dtype.element_ty
    tl.store(v_pool_ptr + out, low.to(kind), mask=both)
    tl.store(v_pool_ptr + out + HALF, high.to(kind), mask=both)


BLOCK = 16
"""Tokens a program: 16 x 64 lanes of 16 bytes each keep four warps busy at head size 128."""


def rope_scatter_triton(raw_k, v, source, positions, slots, table, k_pool, v_pool) -> None:
    """The Triton kernel; arguments as in :func:`reference`. Rows must be dense in heads and d."""
    count = source.numel()
    if count == 0:
        return
    heads, dim = raw_k.shape[1:]
    for x in (raw_k, v):
        assert x.stride()[1:] == (dim, 1), f"rows must be dense, strides are {x.stride()}"
    _rope_scatter_kernel[(triton.cdiv(count, BLOCK), heads)](
        raw_k,
        v,
        source,
        positions,
        slots,
        table,
        k_pool,
        v_pool,
        count,
        raw_k.stride(0),
        v.stride(0),
        *k_pool.stride()[:3],
        *v_pool.stride()[:3],
        PAGE=k_pool.shape[1],
        DIM=dim,
        BLOCK=BLOCK,
        num_warps=4,
    )


def rope_scatter(raw_k, v, source, positions, slots, table, k_pool, v_pool) -> None:
    """Triton on CUDA, torch elsewhere; arguments as in :func:`reference`."""
    path = rope_scatter_triton if raw_k.is_cuda else reference
    path(raw_k, v, source, positions, slots, table, k_pool, v_pool)
