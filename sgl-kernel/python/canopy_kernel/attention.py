"""Position-causal sparse prefill attention: queries at any positions, keys at or before them.

A query at position p attends to the keys of positions 0..p of its own request. The mask depends on
positions, never on row indices. The queries of a request are sorted by position, so each block of
queries has a last key, and no dense mask is needed.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn.functional import scaled_dot_product_attention

from canopy_kernel import pages
from canopy_kernel.ragged import RequestSlices, Rows
from canopy_kernel.triton_attention import sparse_prefill_triton

__all__ = [
    "Block",
    "Plan",
    "Rows",
    "attend",
    "attend_causally",
    "attend_in_blocks",
    "make_blocks",
    "make_plan",
    "reference",
    "sparse_prefill",
    "sparse_prefill_triton",
]


def reference(
    q: torch.Tensor, k_pool: torch.Tensor, v_pool: torch.Tensor, rows: Rows, scale: float
) -> torch.Tensor:
    """Compute dense masked attention in fp32: ``q [m, heads, d]`` -> ``[m, heads, d]``, q's dtype."""
    out = torch.empty_like(q)
    for queries, keys in rows.request_slices():
        k = pages.read(k_pool, rows.slots[keys]).float()
        v = pages.read(v_pool, rows.slots[keys]).float()
        group = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        score = torch.einsum("mhd,nhd->hmn", q[queries].float(), k) * scale
        is_hidden = torch.arange(k.shape[0], device=q.device) > rows.positions[queries, None]
        weight = torch.softmax(score.masked_fill(is_hidden, float("-inf")), dim=-1)
        out[queries] = torch.einsum("hmn,nhd->mhd", weight, v).to(q.dtype)
    return out


BLOCK_QUERIES = 64
"""Queries of a block on a CPU; a longer one computes more hidden keys."""


@dataclass(frozen=True, slots=True)
class Block:
    """Queries ``start:end`` over the first ``key_count`` keys; mask: bool ``[queries, keys]``, visible keys."""

    start: int
    end: int
    key_count: int
    mask: torch.Tensor


def make_blocks(positions: torch.Tensor) -> list[Block]:
    """Return the blocks of sorted ``positions [m]``; equal for all layers."""
    host_positions = positions.cpu()
    blocks = []
    for start in range(0, len(host_positions), BLOCK_QUERIES):
        queries = host_positions[start : start + BLOCK_QUERIES]
        key_count = int(queries[-1]) + 1
        mask = torch.arange(key_count) <= queries[:, None]
        blocks.append(Block(start, start + len(queries), key_count, mask))
    return blocks


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, blocks: list[Block], scale: float
) -> torch.Tensor:
    """Attend from ``q [m, heads, d]`` to ``k, v [n, kv_heads, d]`` in position order, on a CPU."""
    m, heads, dim = q.shape
    kv_heads, group = k.shape[1], heads // k.shape[1]
    # A KV head is a batch of its query heads, so keys and values are not copied.
    query = q.view(m, kv_heads, group, dim).permute(1, 2, 0, 3)
    key, value = (x.transpose(0, 1)[:, None].expand(-1, group, -1, -1) for x in (k, v))
    out = torch.empty_like(q)
    for block in blocks:
        block_out = scaled_dot_product_attention(
            query[:, :, block.start : block.end],
            key[:, :, : block.key_count],
            value[:, :, : block.key_count],
            attn_mask=block.mask,
            scale=scale,
        )
        out[block.start : block.end] = block_out.permute(2, 0, 1, 3).reshape(-1, heads, dim)
    return out


def attend_causally(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float
) -> torch.Tensor:
    """Compute torch's causal attention over all positions of one request, in order."""
    query, key, value = (x.transpose(0, 1)[None] for x in (q, k, v))
    gqa = q.shape[1] != k.shape[1]
    out = scaled_dot_product_attention(
        query, key, value, is_causal=True, scale=scale, enable_gqa=gqa
    )
    return out[0].transpose(0, 1)


Plan = list[tuple[RequestSlices, list[Block]]]
"""Slices and blocks of each request on a CPU; equal for all layers."""


def make_plan(rows: Rows) -> Plan:
    """Plan :func:`attend_in_blocks` for ``rows``."""
    return [
        (slices, make_blocks(rows.positions[slices.queries])) for slices in rows.request_slices()
    ]


def attend_in_blocks(
    q: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    rows: Rows,
    scale: float,
    plan: Plan | None = None,
) -> torch.Tensor:
    """Attend on a CPU, in blocks of queries; arguments as in :func:`sparse_prefill`."""
    out = torch.empty_like(q)
    for (queries, keys), blocks in make_plan(rows) if plan is None else plan:
        slots = rows.slots[keys]
        k, v = (pages.read(pool, slots).to(q.dtype) for pool in (k_pool, v_pool))
        out[queries] = attend(q[queries], k, v, blocks, scale)
    return out


def sparse_prefill(
    q: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    rows: Rows,
    scale: float,
    backend: str = "auto",
) -> torch.Tensor:
    """Compute attention of sparse rows over a paged cache.

    q: ``[m, heads, d]``; pools: views ``[pages, page_tokens, kv_heads, d]`` that already hold the
    recomputed rows; returns ``[m, heads, d]``. backend: ``auto``, ``triton``, ``blocked``
    (torch) or ``reference``.
    """
    if backend == "auto":
        backend = "triton" if q.is_cuda else "blocked"
    implementations = {
        "triton": sparse_prefill_triton,
        "blocked": attend_in_blocks,
        "reference": reference,
    }
    if backend not in implementations:
        raise ValueError(f"backend {backend!r}: allowed are auto, {', '.join(implementations)}")
    return implementations[backend](q, k_pool, v_pool, rows, scale)
