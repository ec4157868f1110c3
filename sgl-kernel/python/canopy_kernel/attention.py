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
from canopy_kernel.ragged import Rows
from canopy_kernel.triton_attention import sparse_prefill_triton

__all__ = [
    "Block",
    "Plan",
    "Rows",
    "attend",
    "attend_in_blocks",
    "blocks",
    "causal",
    "plan",
    "reference",
    "sparse_prefill",
    "sparse_prefill_triton",
]


def reference(
    q: torch.Tensor, k_pool: torch.Tensor, v_pool: torch.Tensor, rows: Rows, scale: float
) -> torch.Tensor:
    """Compute dense masked attention in fp32: ``q [m, heads, d]`` -> ``[m, heads, d]``, q's dtype."""
    out = torch.empty_like(q)
    for qs, ks in rows.requests():
        k = pages.read(k_pool, rows.slots[ks]).float()
        v = pages.read(v_pool, rows.slots[ks]).float()
        group = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        score = torch.einsum("mhd,nhd->hmn", q[qs].float(), k) * scale
        hidden = torch.arange(k.shape[0], device=q.device) > rows.positions[qs, None]
        weight = torch.softmax(score.masked_fill(hidden, float("-inf")), dim=-1)
        out[qs] = torch.einsum("hmn,nhd->mhd", weight, v).to(q.dtype)
    return out


BLOCK = 64
"""Queries of a block on a CPU; a longer one computes more hidden keys."""


@dataclass(frozen=True, slots=True)
class Block:
    """Queries ``first..last`` over the first ``keys`` keys; mask: bool ``[queries, keys]``, visible keys."""

    first: int
    last: int
    keys: int
    mask: torch.Tensor


def blocks(positions: torch.Tensor) -> list[Block]:
    """Return the blocks of sorted ``positions [m]``; equal for all layers."""
    at = positions.cpu()
    blocks = []
    for first in range(0, len(at), BLOCK):
        some = at[first : first + BLOCK]
        keys = int(some[-1]) + 1
        blocks.append(Block(first, first + len(some), keys, torch.arange(keys) <= some[:, None]))
    return blocks


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, planned: list[Block], scale: float
) -> torch.Tensor:
    """Attend from ``q [m, heads, d]`` to ``k, v [n, kv_heads, d]`` in position order, on a CPU."""
    m, heads, dim = q.shape
    kv_heads, group = k.shape[1], heads // k.shape[1]
    # A KV head is a batch of its query heads, so keys and values are not copied.
    query = q.view(m, kv_heads, group, dim).permute(1, 2, 0, 3)
    key, value = (x.transpose(0, 1)[:, None].expand(-1, group, -1, -1) for x in (k, v))
    out = torch.empty_like(q)
    for block in planned:
        part = scaled_dot_product_attention(
            query[:, :, block.first : block.last],
            key[:, :, : block.keys],
            value[:, :, : block.keys],
            attn_mask=block.mask,
            scale=scale,
        )
        out[block.first : block.last] = part.permute(2, 0, 1, 3).reshape(-1, heads, dim)
    return out


def causal(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
    """Compute torch's causal attention over all positions of one request, in order."""
    query, key, value = (x.transpose(0, 1)[None] for x in (q, k, v))
    gqa = q.shape[1] != k.shape[1]
    out = scaled_dot_product_attention(
        query, key, value, is_causal=True, scale=scale, enable_gqa=gqa
    )
    return out[0].transpose(0, 1)


Plan = list[tuple[slice, slice, list[Block]]]
"""Queries, keys and blocks of each request on a CPU; equal for all layers."""


def plan(rows: Rows) -> Plan:
    """Plan :func:`attend_in_blocks` for ``rows``."""
    return [(qs, ks, blocks(rows.positions[qs])) for qs, ks in rows.requests()]


def attend_in_blocks(
    q: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    rows: Rows,
    scale: float,
    planned: Plan | None = None,
) -> torch.Tensor:
    """Run the CPU path, in blocks of queries."""
    out = torch.empty_like(q)
    for qs, ks, blocks in plan(rows) if planned is None else planned:
        slots = rows.slots[ks]
        k, v = (pages.read(pool, slots).to(q.dtype) for pool in (k_pool, v_pool))
        out[qs] = attend(q[qs], k, v, blocks, scale)
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

    q: ``[m, heads, d]``; pools: views ``[pages, page_size, kv_heads, d]`` that already hold the
    recomputed rows; returns ``[m, heads, d]``. backend: ``auto``, ``triton``, ``blocked``
    (torch) or ``reference``.
    """
    if backend == "auto":
        backend = "triton" if q.is_cuda else "blocked"
    paths = {"triton": sparse_prefill_triton, "blocked": attend_in_blocks, "reference": reference}
    if backend not in paths:
        raise ValueError(f"backend {backend!r}: allowed are auto, {', '.join(paths)}")
    return paths[backend](q, k_pool, v_pool, rows, scale)
