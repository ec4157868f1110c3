"""Sparse prefill attention on a CPU, one request: many rows of fp32 by columns, others by halves."""

from __future__ import annotations

import torch

from canopy_kernel import columns, halves

Plan = columns.Plan | list[halves.Step]


def plan(positions: torch.Tensor, group: int, dtype: torch.dtype) -> Plan:
    """What depends on sorted, distinct ``positions [m]`` alone: made once, read by every layer."""
    if dtype == torch.float32 and positions.numel() > halves.LEAF:
        return columns.plan(positions, group)
    return halves.plan(positions, group, dtype)


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, plan: Plan, scale: float
) -> torch.Tensor:
    """``q [m, heads, d]`` over ``k, v [n, kv_heads, d]`` in position order -> ``[m, heads, d]``."""
    if isinstance(plan, columns.Plan):
        return columns.attend(q, k, v, plan, scale)
    return halves.attend(q, k, v, plan, scale)


def causal(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
    """Every position of one request in order: torch's own causal attention."""
    query, key, value = (x.transpose(0, 1)[None] for x in (q, k, v))
    gqa = q.shape[1] != k.shape[1]
    out = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, is_causal=True, scale=scale, enable_gqa=gqa
    )
    return out[0].transpose(0, 1)
