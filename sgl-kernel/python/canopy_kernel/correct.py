"""Corrections of reused K and V: weighted sums of known differences, clipped, added in the pool.

``k_pool[slots[i]] += rotate(clip(sum_j weight[i, j] * delta_k[index[i, j]]), positions[i])``, and V
alike without the rotation. A head's sum is scaled down to the length ``limit`` where it is longer.
One pass over the pool's rows, which stay where they are: the floor is a read and a write a token.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from canopy_kernel import pages
from canopy_kernel.rows import (
    Turns,
    add_turned,
    load_angles,
    load_halves,
    load_pool,
    rotated,
    store_halves,
    turn,
    warps,
)
from canopy_kernel.triton_shim import tl, triton


def weighted(
    delta: torch.Tensor, index: torch.Tensor, weight: torch.Tensor, limit: torch.Tensor
) -> torch.Tensor:
    """``delta [rows, kv_heads, d]`` fp32 -> ``[n, kv_heads, d]`` fp32, each head at most ``limit
    [kv_heads]`` long; index, weight: ``[n, w]``."""
    out, scale = _sums(delta, index, weight, limit)
    return out.mul_(scale)


def _sums(
    delta: torch.Tensor,
    index: torch.Tensor,
    weight: torch.Tensor,
    limit: torch.Tensor,
    offsets: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The sums ``[n, kv_heads, d]`` as they are, and what shortens them, ``[n, kv_heads, 1]``.

    offsets ``[n]``: where each row's own begin in an index and weight of one dimension.
    """
    rows = delta.flatten(1)
    out = F.embedding_bag(index, rows, offsets, per_sample_weights=weight, mode="sum")
    out = out.view(-1, *delta.shape[1:])
    length = torch.linalg.vector_norm(out, dim=-1, keepdim=True).clamp_(min=1e-20)
    return out, (limit[:, None] / length).clamp_(max=1.0)


def reference(
    delta_k: torch.Tensor,
    delta_v: torch.Tensor,
    index: torch.Tensor,
    weight: torch.Tensor,
    limit_k: torch.Tensor,
    limit_v: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    table: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
) -> None:
    """Plain torch.

    delta_k, delta_v: ``[rows, kv_heads, d]`` fp32 known differences, of keys before RoPE; index,
    weight: ``[n, w]`` int64 and fp32; limit_k, limit_v: ``[kv_heads]`` fp32; positions: ``[n]`` rows
    of ``table [*, d]`` fp32 (cos then sin); slots: ``[n]``, all different; pools: views ``[pages,
    page_size, kv_heads, d]``, added to.
    """
    k = rotated(weighted(delta_k, index, weight, limit_k), table[positions.long()])
    pages.write(k_pool, slots, pages.read(k_pool, slots).float() + k)
    v = weighted(delta_v, index, weight, limit_v)
    pages.write(v_pool, slots, pages.read(v_pool, slots).float() + v)


def in_order(
    delta_k: torch.Tensor,
    delta_v: torch.Tensor,
    index: torch.Tensor,
    weight: torch.Tensor,
    limit_k: torch.Tensor,
    limit_v: torch.Tensor,
    offsets: torch.Tensor,
    turns: Turns,
    k: torch.Tensor,
    v: torch.Tensor,
) -> None:
    """As :func:`reference` for rows ``k, v [n, kv_heads, d]`` that lie together, some of which may
    have no weights: index, weight ``[*]``, from ``offsets [n]`` on each row's own; turns: to the
    rows' positions."""
    known = (index, weight)
    part, scale = _sums(delta_k, *known, limit_k, offsets)
    if k.dtype == torch.float32:
        add_turned(part.mul_(scale), turns, k)
    else:
        k.copy_(add_turned(part.mul_(scale), turns, k.float()))
    part, scale = _sums(delta_v, *known, limit_v, offsets)
    if v.dtype == torch.float32:
        v.addcmul_(part, scale)
    else:
        v.add_(part.mul_(scale))


@triton.jit
def _sum_halves(
    delta_ptr,
    index_ptr,
    weight_ptr,
    limit_ptr,
    token,
    head,
    dims,
    both,
    alive,
    row_stride,
    WIDTH: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK: tl.constexpr,
):
    low = tl.zeros([BLOCK, DIM // 2], tl.float32)
    high = tl.zeros([BLOCK, DIM // 2], tl.float32)
    for j in range(WIDTH):
        source = tl.load(index_ptr + token * WIDTH + j, mask=alive, other=0).to(tl.int64)
        share = tl.load(weight_ptr + token * WIDTH + j, mask=alive, other=0.0)
        a, b = load_halves(delta_ptr, source, row_stride, head, dims, both, DIM)
        low += share[:, None] * a
        high += share[:, None] * b
    length = tl.sqrt(tl.sum(low * low, axis=1) + tl.sum(high * high, axis=1))
    limit = tl.load(limit_ptr + head)
    scale = tl.where(length > limit, limit / tl.maximum(length, 1e-20), 1.0)
    return low * scale[:, None], high * scale[:, None]


@triton.jit
def _correct_kernel(
    delta_k_ptr,
    delta_v_ptr,
    index_ptr,
    weight_ptr,
    limit_k_ptr,
    limit_v_ptr,
    positions_ptr,
    slots_ptr,
    table_ptr,
    k_pool_ptr,
    v_pool_ptr,
    count,
    dk_row,
    dv_row,
    kp_page,
    kp_token,
    kp_head,
    vp_page,
    vp_token,
    vp_head,
    WIDTH: tl.constexpr,
    PAGE: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK: tl.constexpr,
):
    head = tl.program_id(1)
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    alive = token < count
    slot = tl.load(slots_ptr + token, mask=alive, other=0).to(tl.int64)
    position = tl.load(positions_ptr + token, mask=alive, other=0).to(tl.int64)
    dims = tl.arange(0, DIM // 2)
    both = alive[:, None]
    low, high = _sum_halves(
        delta_k_ptr, index_ptr, weight_ptr, limit_k_ptr, token, head, dims, both, alive, dk_row,
        WIDTH, DIM, BLOCK,
    )  # fmt: skip
    cos, sin = load_angles(table_ptr, position, dims, both, DIM)
    low, high = turn(low, high, cos, sin)
    a, b = load_pool(
        k_pool_ptr, slot, head, dims, both, kp_page, kp_token, kp_head, PAGE, DIM
    )  # fmt: skip
    store_halves(
        k_pool_ptr, slot, head, dims, a + low, b + high, both, kp_page, kp_token, kp_head, PAGE, DIM
    )
    low, high = _sum_halves(
        delta_v_ptr, index_ptr, weight_ptr, limit_v_ptr, token, head, dims, both, alive, dv_row,
        WIDTH, DIM, BLOCK,
    )  # fmt: skip
    a, b = load_pool(
        v_pool_ptr, slot, head, dims, both, vp_page, vp_token, vp_head, PAGE, DIM
    )  # fmt: skip
    store_halves(
        v_pool_ptr, slot, head, dims, a + low, b + high, both, vp_page, vp_token, vp_head, PAGE, DIM
    )


BLOCK = 16
"""Tokens a program, as in ``rope_scatter``."""


def correct_triton(
    delta_k, delta_v, index, weight, limit_k, limit_v, positions, slots, table, k_pool, v_pool
) -> None:
    """The Triton kernel; arguments as in :func:`reference`. Differences must be dense."""
    count = slots.numel()
    if count == 0:
        return
    heads, dim = delta_k.shape[1:]
    for x in (delta_k, delta_v):
        assert x.stride()[1:] == (dim, 1), f"rows must be dense, strides are {x.stride()}"
    for x in (index, weight):
        assert x.is_contiguous(), "index and weight must be dense"
    _correct_kernel[(triton.cdiv(count, BLOCK), heads)](
        delta_k,
        delta_v,
        index,
        weight,
        limit_k,
        limit_v,
        positions,
        slots,
        table,
        k_pool,
        v_pool,
        count,
        delta_k.stride(0),
        delta_v.stride(0),
        *k_pool.stride()[:3],
        *v_pool.stride()[:3],
        WIDTH=index.shape[1],
        PAGE=k_pool.shape[1],
        DIM=dim,
        BLOCK=BLOCK,
        num_warps=warps(dim),
    )


def correct(
    delta_k, delta_v, index, weight, limit_k, limit_v, positions, slots, table, k_pool, v_pool
) -> None:
    """Triton on CUDA, torch elsewhere; arguments as in :func:`reference`."""
    path = correct_triton if delta_k.is_cuda else reference
    path(delta_k, delta_v, index, weight, limit_k, limit_v, positions, slots, table, k_pool, v_pool)
