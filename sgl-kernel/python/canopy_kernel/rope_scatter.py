"""Rope-scatter: reused K and V from a chunk's rows to the paged pool, keys rotated on the way.

One pass reads each row once and writes it once: the floor is two reads and two writes a token.
"""

from __future__ import annotations

import torch

from canopy_kernel import pages
from canopy_kernel.rows import load_halves, rotated, store_halves, turn
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
    turned = rotated(raw_k[source.long()], table[positions.long()])
    pages.write(k_pool, slots, turned)
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
    dims = tl.arange(0, DIM // 2)
    both = alive[:, None]
    low, high = load_halves(raw_k_ptr, source, k_row, head, dims, both, DIM)
    low, high = turn(low, high, table_ptr, position, dims, both, DIM)
    store_halves(
        k_pool_ptr, slot, head, dims, low, high, both, kp_page, kp_token, kp_head, PAGE, DIM
    )
    low, high = load_halves(v_ptr, source, v_row, head, dims, both, DIM)
    store_halves(
        v_pool_ptr, slot, head, dims, low, high, both, vp_page, vp_token, vp_head, PAGE, DIM
    )


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
