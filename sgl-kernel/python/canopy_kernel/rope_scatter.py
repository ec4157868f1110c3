"""Rope-scatter: copy reused K and V from chunks' rows to the paged pool, and rotate the keys.

One pass reads and writes each row once, and reads a token's angles once for all heads. Rows may be in
several tensors (one per chunk) and are copied to several pools (one per layer), by address.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from canopy_kernel import pages
from canopy_kernel.rows import (
    load_angles,
    load_halves,
    rotate,
    rotate_halves,
    store_halves,
    warps_per_program,
)
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
    """Copy in plain torch.

    raw_k, v: ``[rows, kv_heads, d]`` (keys before RoPE); source: ``[n]`` source rows; positions:
    ``[n]`` new positions; slots: ``[n]`` destination slots; table: ``[positions, d]`` fp32 cos then
    sin (SGLang's ``cos_sin_cache``); pools: views ``[pages, page_size, kv_heads, d]``, written.
    """
    rotated_k = rotate(raw_k[source.long()], table[positions.long()])
    pages.write(k_pool, slots, rotated_k)
    pages.write(v_pool, slots, v[source.long()])


@triton.jit
def _rope_scatter_kernel(
    row_type_ptr,
    transfers_ptr,
    source_ptr,
    positions_ptr,
    slots_ptr,
    table_ptr,
    pool_ptr,
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
    transfer = transfers_ptr + tl.program_id(1) * 8
    first_token = tl.load(transfer + 4) + tl.program_id(0) * BLOCK
    end = tl.load(transfer + 5)
    # Triton cannot infer the alignment of addresses loaded from a table; torch aligns these rows.
    k_ptr = tl.multiple_of(tl.load(transfer).to(row_type_ptr.dtype), 16)
    v_ptr = tl.multiple_of(tl.load(transfer + 1).to(row_type_ptr.dtype), 16)
    k_row = tl.multiple_of(tl.load(transfer + 2), 16)
    v_row = tl.multiple_of(tl.load(transfer + 3), 16)
    k_pool_ptr = tl.multiple_of(tl.load(transfer + 6).to(pool_ptr.dtype), 16)
    v_pool_ptr = tl.multiple_of(tl.load(transfer + 7).to(pool_ptr.dtype), 16)
    dims = tl.arange(0, DIM // 2)
    for block_start in tl.range(first_token, end, tl.num_programs(0) * BLOCK):
        token = block_start + tl.arange(0, BLOCK)
        is_token = token < end
        source = tl.load(source_ptr + token, mask=is_token, other=0).to(tl.int64)
        position = tl.load(positions_ptr + token, mask=is_token, other=0).to(tl.int64)
        slot = tl.load(slots_ptr + token, mask=is_token, other=0).to(tl.int64)
        mask = is_token[:, None]
        cos, sin = load_angles(table_ptr, position, dims, mask, DIM)
        for head in tl.range(0, HEADS, loop_unroll_factor=2):
            low, high = load_halves(k_ptr, source, k_row, head, dims, mask, DIM)
            low, high = rotate_halves(low, high, cos, sin)
            store_halves(
                k_pool_ptr, slot, head, dims, low, high, mask, kp_page, kp_token, kp_head, PAGE, DIM
            )
            low, high = load_halves(v_ptr, source, v_row, head, dims, mask, DIM)
            store_halves(
                v_pool_ptr, slot, head, dims, low, high, mask, vp_page, vp_token, vp_head, PAGE, DIM
            )


BLOCK_TOKENS = 8
"""Tokens per program, small enough to occupy a chip at 2,000 tokens."""


@dataclass(slots=True)
class LayersScatter:
    """Copy rows of several tensors into the pools of several layers, in few launches.

    keys, values: ``[layers, rows, kv_heads, d]`` each, of one type; counts: tokens from each tensor, in
    order; ``source [sum of counts]``: row in its tensor, equal for all layers; pools: one view per
    layer, of one shape and type; max_programs: bound of a launch, but at least one per tensor and
    layer. Otherwise as :func:`reference`.
    """

    keys: Sequence[torch.Tensor]
    values: Sequence[torch.Tensor]
    counts: Sequence[int]
    source: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    table: torch.Tensor
    k_pools: Sequence[torch.Tensor]
    v_pools: Sequence[torch.Tensor]
    max_programs: int | None = None
    _transfers: torch.Tensor | None = None

    def run(self, first: int = 0, end: int | None = None) -> None:
        """Copy layers ``first`` up to, but not including, ``end``; Triton on CUDA, else torch.

        Raises ValueError for rows that are not dense, not of one type, or not 16-byte aligned.
        """
        end = len(self.k_pools) if end is None else end
        (self.launch if self.k_pools[0].is_cuda else self.reference)(first, end)

    def reference(self, first: int, end: int) -> None:
        """Copy in plain torch."""
        for layer in range(first, end):
            start = 0
            for k, v, count in zip(self.keys, self.values, self.counts):
                tokens = slice(start, start + count)
                numbers = (self.source[tokens], self.positions[tokens], self.slots[tokens])
                pools = (self.k_pools[layer], self.v_pools[layer])
                reference(k[layer], v[layer], *numbers, self.table, *pools)
                start += count

    def launch(self, first: int, end: int) -> None:
        """Launch the Triton kernel once for all these layers."""
        blocks, transfers = grid = self.grid(first, end)
        if not blocks or not transfers:
            return
        if self._transfers is None:
            self._transfers = self._addresses()
        k_pool, v_pool = self.k_pools[0], self.v_pools[0]
        heads, dim = self.keys[0].shape[2:]
        transfers_per_layer = len(self.counts)
        _rope_scatter_kernel[grid](
            self.keys[0],
            self._transfers[transfers_per_layer * first : transfers_per_layer * end],
            self.source,
            self.positions,
            self.slots,
            self.table,
            k_pool,
            *k_pool.stride()[:3],
            *v_pool.stride()[:3],
            HEADS=heads,
            PAGE=k_pool.shape[1],
            DIM=dim,
            BLOCK=BLOCK_TOKENS,
            num_warps=warps_per_program(dim),
        )

    def grid(self, first: int, end: int) -> tuple[int, int]:
        """Return the programs per transfer of a launch, and its transfers: one per tensor and layer."""
        transfers = len(self.counts) * (end - first)
        blocks = triton.cdiv(max(self.counts, default=0), BLOCK_TOKENS)
        if self.max_programs is not None and transfers:
            blocks = min(blocks, max(1, self.max_programs // transfers))
        return blocks, transfers

    def _addresses(self) -> torch.Tensor:
        """Return ``[layers * tensors, 8]`` int64: addresses of K and V rows, their strides, the first
        and end token, and the addresses of both pools."""
        if not (len(self.keys) == len(self.values) == len(self.counts)):
            raise ValueError(
                f"{len(self.keys)} keys, {len(self.values)} values, {len(self.counts)} counts: "
                "not alike"
            )
        for x in (*self.keys, *self.values):
            _check_rows(x, self.keys[0])
        for pools in (self.k_pools, self.v_pools):
            for pool in pools:
                if pool.stride() != pools[0].stride() or pool.data_ptr() % 16:
                    raise ValueError("pools of one launch have one shape and begin at 16 bytes")
        transfers = []
        for layer, pools in enumerate(zip(self.k_pools, self.v_pools)):
            pool_addresses = [pool.data_ptr() for pool in pools]
            start = 0
            for k, v, count in zip(self.keys, self.values, self.counts):
                row_addresses = [
                    x.data_ptr() + layer * x.stride(0) * x.element_size() for x in (k, v)
                ]
                strides, tokens = (k.stride(1), v.stride(1)), (start, start + count)
                transfers.append([*row_addresses, *strides, *tokens, *pool_addresses])
                start += count
        table = torch.tensor(transfers, dtype=torch.int64)
        device = self.k_pools[0].device  # the rows may be in pinned host memory
        return table.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else table


def _check_rows(x: torch.Tensor, expected: torch.Tensor) -> None:
    """Raise ValueError unless rows are dense, 16-byte aligned, and of the type and heads of ``expected``."""
    heads, dim = expected.shape[2:]
    if x.stride()[2:] != (dim, 1) or x.dtype != expected.dtype:
        raise ValueError(
            f"rows are {x.dtype} with strides {x.stride()[1:]}: allowed are dense rows "
            f"[*, {heads}, {dim}] of one type ({expected.dtype})"
        )
    layer_bytes = x.stride(0) * x.element_size() if x.shape[0] > 1 else 0
    if (x.data_ptr() | layer_bytes) % 16 or x.stride(1) % 16:
        raise ValueError("rows must begin at multiples of 16 bytes; copy the tensor")


def scatter_of_layer(
    keys: Sequence[torch.Tensor],
    values: Sequence[torch.Tensor],
    counts: Sequence[int],
    source: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    table: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
) -> LayersScatter:
    """Return a :class:`LayersScatter` of a single layer: ``keys, values [rows, kv_heads, d]``."""
    keys, values = ([x[None] for x in rows] for rows in (keys, values))
    return LayersScatter(
        keys, values, counts, source, positions, slots, table, [k_pool], [v_pool]
    )  # fmt: skip


def rope_scatter_triton(raw_k, v, source, positions, slots, table, k_pool, v_pool) -> None:
    """Launch the Triton kernel; arguments as in :func:`reference`. Rows dense in heads and d."""
    counts = [source.numel()]
    scatter_of_layer([raw_k], [v], counts, source, positions, slots, table, k_pool, v_pool).launch(
        0, 1
    )
