"""Uniform views of paged KV pools of all memory layouts."""

from __future__ import annotations

import torch

LAYOUTS = ("NHD", "HND")


def view(pool: torch.Tensor, layout: str = "NHD") -> torch.Tensor:
    """Return a ``[pages, page_tokens, kv_heads, head_dim]`` view of a pool.

    NHD memory has this shape; HND memory is ``[pages, kv_heads, page_tokens, head_dim]``.
    """
    if layout not in LAYOUTS:
        raise ValueError(f"layout {layout!r}: allowed are {', '.join(LAYOUTS)}")
    return pool if layout == "NHD" else pool.transpose(1, 2)


def view_flat(pool: torch.Tensor) -> torch.Tensor:
    """View a pool ``[slots, kv_heads, head_dim]`` (SGLang's buffers) as pages of one token."""
    return pool[:, None]


def read(pool: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """Return the rows ``[n, kv_heads, head_dim]`` of a pool view at ``slots [n]``."""
    page_tokens = pool.shape[1]
    slots = slots.long()
    if page_tokens == 1:  # a third of the time of indexing on a CPU
        return pool[:, 0].index_select(0, slots)
    return pool[slots // page_tokens, slots % page_tokens]


def write(pool: torch.Tensor, slots: torch.Tensor, rows: torch.Tensor) -> None:
    """Write ``rows [n, kv_heads, head_dim]`` at ``slots [n]`` of a pool view, in its dtype."""
    page_tokens = pool.shape[1]
    slots = slots.long()
    if page_tokens == 1:  # avoid the division by the page size
        pool[:, 0].index_copy_(0, slots, rows.to(pool.dtype))
        return
    pool[slots // page_tokens, slots % page_tokens] = rows.to(pool.dtype)
