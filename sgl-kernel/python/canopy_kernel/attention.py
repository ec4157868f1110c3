"""Position-causal sparse prefill attention: queries at any positions, keys at or before them.

A query at position p attends to the keys of positions 0..p of its own request. The mask depends on
positions, never on row indices. The queries of a request are sorted by position, so each block of
queries has a last key, and no dense mask is needed.
"""

from __future__ import annotations

import torch

from canopy_kernel import halves, pages
from canopy_kernel.ragged import Rows
from canopy_kernel.triton_attention import sparse_prefill_triton

__all__ = [
    "Plan",
    "Rows",
    "blocked",
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


Plan = list[tuple[slice, slice, list[halves.Step]]]
"""Queries, keys and CPU steps of each request; equal for all layers."""


def plan(q: torch.Tensor, k_pool: torch.Tensor, rows: Rows) -> Plan:
    """Plan :func:`blocked` for ``rows``; ``q`` and ``k_pool`` supply head counts and dtype."""
    group = q.shape[1] // k_pool.shape[2]
    return [(qs, ks, halves.plan(rows.positions[qs], group, q.dtype)) for qs, ks in rows.requests()]


def blocked(
    q: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    rows: Rows,
    scale: float,
    planned: Plan | None = None,
) -> torch.Tensor:
    """Run the CPU path, which halves the queries until masks are small (:mod:`.halves`)."""
    out = torch.empty_like(q)
    for qs, ks, steps in plan(q, k_pool, rows) if planned is None else planned:
        slots = rows.slots[ks]
        k, v = (pages.read(pool, slots).to(q.dtype) for pool in (k_pool, v_pool))
        out[qs] = halves.attend(q[qs], k, v, steps, scale)
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
    paths = {"triton": sparse_prefill_triton, "blocked": blocked, "reference": reference}
    if backend not in paths:
        raise ValueError(f"backend {backend!r}: allowed are auto, {', '.join(paths)}")
    return paths[backend](q, k_pool, v_pool, rows, scale)
