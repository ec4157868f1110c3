"""Rope-scatter: reused K and V from a chunk's rows to the paged pool, keys rotated on the way.

One pass reads each row once and writes it once, and a token's angles once for all heads. The rows
may lie in several tensors (one a chunk): they are taken where they are, by address.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from canopy_kernel import pages
from canopy_kernel.rows import load_angles, load_halves, rotated, store_halves, turn, warps
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
    like_ptr,
    pieces_ptr,
    source_ptr,
    positions_ptr,
    slots_ptr,
    table_ptr,
    k_pool_ptr,
    v_pool_ptr,
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
    piece = pieces_ptr + tl.program_id(1) * 6
    first = tl.load(piece + 4) + tl.program_id(0) * BLOCK
    end = tl.load(piece + 5)
    if first >= end:
        return
    # An address from a table carries no promise of alignment: torch's rows have it.
    k_ptr = tl.multiple_of(tl.load(piece).to(like_ptr.dtype), 16)
    v_ptr = tl.multiple_of(tl.load(piece + 1).to(like_ptr.dtype), 16)
    k_row = tl.multiple_of(tl.load(piece + 2), 16)
    v_row = tl.multiple_of(tl.load(piece + 3), 16)
    token = first + tl.arange(0, BLOCK)
    alive = token < end
    source = tl.load(source_ptr + token, mask=alive, other=0).to(tl.int64)
    position = tl.load(positions_ptr + token, mask=alive, other=0).to(tl.int64)
    slot = tl.load(slots_ptr + token, mask=alive, other=0).to(tl.int64)
    dims = tl.arange(0, DIM // 2)
    both = alive[:, None]
    cos, sin = load_angles(table_ptr, position, dims, both, DIM)
    for head in tl.range(0, HEADS, loop_unroll_factor=2):
        low, high = load_halves(k_ptr, source, k_row, head, dims, both, DIM)
        low, high = turn(low, high, cos, sin)
        store_halves(
            k_pool_ptr, slot, head, dims, low, high, both, kp_page, kp_token, kp_head, PAGE, DIM
        )
        low, high = load_halves(v_ptr, source, v_row, head, dims, both, DIM)
        store_halves(
            v_pool_ptr, slot, head, dims, low, high, both, vp_page, vp_token, vp_head, PAGE, DIM
        )


BLOCK = 8
"""Tokens a program: enough programs for a chip at 2,000 tokens."""


def rope_scatter_pieces_triton(
    keys: Sequence[torch.Tensor],
    values: Sequence[torch.Tensor],
    counts: Sequence[int],
    source: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    table: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
) -> None:
    """Several tensors' rows in one launch, without a copy that joins them.

    keys, values: ``[rows, kv_heads, d]`` each, of one type; counts: tokens taken from each, in
    order; ``source [sum of counts]``: the row in its own tensor. Otherwise as :func:`reference`.
    Raises ValueError for rows that are not dense, not of one type, or not 16-byte aligned.
    """
    if not (len(keys) == len(values) == len(counts)):
        raise ValueError(f"{len(keys)} keys, {len(values)} values, {len(counts)} counts: not alike")
    longest = max(counts, default=0)
    if longest == 0:
        return
    heads, dim = keys[0].shape[1:]
    pieces, first = [], 0
    for k, v, count in zip(keys, values, counts):
        for x in (k, v):
            if x.stride()[1:] != (dim, 1) or x.dtype != keys[0].dtype:
                raise ValueError(
                    f"rows are {x.dtype} with strides {x.stride()}: allowed are dense rows "
                    f"[*, {heads}, {dim}] of one type ({keys[0].dtype})"
                )
            if x.data_ptr() % 16 or x.stride(0) % 16:
                raise ValueError("rows must begin at multiples of 16 bytes; copy the tensor")
        pieces.append([k.data_ptr(), v.data_ptr(), k.stride(0), v.stride(0), first, first + count])
        first += count
    where = torch.tensor(pieces, dtype=torch.int64)
    if k_pool.is_cuda:  # the rows may lie in pinned memory of the host
        where = where.pin_memory().to(k_pool.device, non_blocking=True)
    _rope_scatter_kernel[(triton.cdiv(longest, BLOCK), len(pieces))](
        keys[0],
        where,
        source,
        positions,
        slots,
        table,
        k_pool,
        v_pool,
        *k_pool.stride()[:3],
        *v_pool.stride()[:3],
        HEADS=heads,
        PAGE=k_pool.shape[1],
        DIM=dim,
        BLOCK=BLOCK,
        num_warps=warps(dim),
    )


def rope_scatter_triton(raw_k, v, source, positions, slots, table, k_pool, v_pool) -> None:
    """The Triton kernel; arguments as in :func:`reference`. Rows must be dense in heads and d."""
    rope_scatter_pieces_triton(
        [raw_k], [v], [source.numel()], source, positions, slots, table, k_pool, v_pool
    )


def rope_scatter(raw_k, v, source, positions, slots, table, k_pool, v_pool) -> None:
    """Triton on CUDA, torch elsewhere; arguments as in :func:`reference`."""
    path = rope_scatter_triton if raw_k.is_cuda else reference
    path(raw_k, v, source, positions, slots, table, k_pool, v_pool)


def rope_scatter_pieces(
    keys, values, counts, source, positions, slots, table, k_pool, v_pool
) -> None:
    """Triton on CUDA, torch elsewhere; arguments as in :func:`rope_scatter_pieces_triton`."""
    if not keys:
        return
    if keys[0].is_cuda:
        rope_scatter_pieces_triton(
            keys, values, counts, source, positions, slots, table, k_pool, v_pool
        )
        return
    first = 0
    for k, v, count in zip(keys, values, counts):
        some = slice(first, first + count)
        reference(k, v, source[some], positions[some], slots[some], table, k_pool, v_pool)
        first += count
