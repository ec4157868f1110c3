"""Fusion: write a layer's recomputed and reused tokens in one pass.

``origin[i] >= 0`` takes row ``origin[i]`` of the fresh K and V (already rotated);
``origin[i] < 0`` takes row ``-1 - origin[i]`` of the reused K and V (keys before RoPE, rotated here).
"""

from __future__ import annotations

import torch

from canopy_kernel import pages
from canopy_kernel.rows import load_angles, load_halves, rotated, store_halves, turn, warps
from canopy_kernel.triton_shim import tl, triton


def reference(
    fresh_k: torch.Tensor,
    fresh_v: torch.Tensor,
    raw_k: torch.Tensor,
    raw_v: torch.Tensor,
    origin: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    table: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
) -> None:
    """Fuse in plain torch. Rows ``[*, kv_heads, d]``; origin, positions, slots ``[n]``; pools: views."""
    origin = origin.long()
    new, old = (origin >= 0).nonzero()[:, 0], (origin < 0).nonzero()[:, 0]
    pages.write(k_pool, slots[new], fresh_k[origin[new]])
    pages.write(v_pool, slots[new], fresh_v[origin[new]])
    take = -1 - origin[old]
    turned = rotated(raw_k[take], table[positions[old].long()])
    pages.write(k_pool, slots[old], turned)
    pages.write(v_pool, slots[old], raw_v[take])


@triton.jit
def _fuse_kernel(
    fresh_k_ptr,
    fresh_v_ptr,
    raw_k_ptr,
    raw_v_ptr,
    origin_ptr,
    positions_ptr,
    slots_ptr,
    table_ptr,
    k_pool_ptr,
    v_pool_ptr,
    count,
    fk_row,
    fv_row,
    rk_row,
    rv_row,
    kp_page,
    kp_token,
    kp_head,
    vp_page,
    vp_token,
    vp_head,
    HEADS: tl.constexpr,
    PAGE: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    alive = token < count
    origin = tl.load(origin_ptr + token, mask=alive, other=0).to(tl.int64)
    position = tl.load(positions_ptr + token, mask=alive, other=0).to(tl.int64)
    slot = tl.load(slots_ptr + token, mask=alive, other=0).to(tl.int64)
    new = (alive & (origin >= 0))[:, None]
    old = (alive & (origin < 0))[:, None]
    new_row = tl.where(origin >= 0, origin, 0)
    old_row = tl.where(origin < 0, -1 - origin, 0)
    dims = tl.arange(0, DIM // 2)
    both = alive[:, None]
    cos, sin = load_angles(table_ptr, position, dims, old, DIM)
    # What is masked loads zeros, so a sum is a choice without a third pass.
    for head in tl.range(0, HEADS, loop_unroll_factor=2):
        low, high = load_halves(raw_k_ptr, old_row, rk_row, head, dims, old, DIM)
        low, high = turn(low, high, cos, sin)
        fresh_low, fresh_high = load_halves(fresh_k_ptr, new_row, fk_row, head, dims, new, DIM)
        low += fresh_low
        high += fresh_high
        store_halves(
            k_pool_ptr, slot, head, dims, low, high, both, kp_page, kp_token, kp_head, PAGE, DIM
        )
        low, high = load_halves(raw_v_ptr, old_row, rv_row, head, dims, old, DIM)
        fresh_low, fresh_high = load_halves(fresh_v_ptr, new_row, fv_row, head, dims, new, DIM)
        low += fresh_low
        high += fresh_high
        store_halves(
            v_pool_ptr, slot, head, dims, low, high, both, vp_page, vp_token, vp_head, PAGE, DIM
        )


BLOCK = 8


def fuse_triton(
    fresh_k, fresh_v, raw_k, raw_v, origin, positions, slots, table, k_pool, v_pool
) -> None:
    """Launch the Triton kernel; arguments as in :func:`reference`. Rows dense in heads and d."""
    count = origin.numel()
    if count == 0:
        return
    heads, dim = raw_k.shape[1:]
    _fuse_kernel[(triton.cdiv(count, BLOCK),)](
        fresh_k,
        fresh_v,
        raw_k,
        raw_v,
        origin,
        positions,
        slots,
        table,
        k_pool,
        v_pool,
        count,
        fresh_k.stride(0),
        fresh_v.stride(0),
        raw_k.stride(0),
        raw_v.stride(0),
        *k_pool.stride()[:3],
        *v_pool.stride()[:3],
        HEADS=heads,
        PAGE=k_pool.shape[1],
        DIM=dim,
        BLOCK=BLOCK,
        num_warps=warps(dim),
    )


def fuse(fresh_k, fresh_v, raw_k, raw_v, origin, positions, slots, table, k_pool, v_pool) -> None:
    """Fuse with Triton on CUDA, with torch elsewhere; arguments as in :func:`reference`."""
    path = fuse_triton if raw_k.is_cuda else reference
    path(fresh_k, fresh_v, raw_k, raw_v, origin, positions, slots, table, k_pool, v_pool)
