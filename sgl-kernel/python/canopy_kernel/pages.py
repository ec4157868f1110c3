"""Paged KV pools seen in one way, whatever their memory layout."""

from __future__ import annotations

import torch

LAYOUTS = ("NHD", "HND")


def view(pool: torch.Tensor, layout: str = "NHD") -> torch.Tensor:
    """``[pages, page_size, kv_heads, head_dim]`` view of a pool.

    NHD memory is that already; HND memory is ``[pages, kv_heads, page_size, head_dim]``.
    """
    if layout not in LAYOUTS:
        raise ValueError(f"layout {layout!r}: allowed are {', '.join(LAYOUTS)}")
    return pool if layout == "NHD" else pool.transpose(1, 2)


def flat(pool: torch.Tensor) -> torch.Tensor:
    """A pool of single tokens, ``[slots, kv_heads, head_dim]`` (SGLang's buffers), as pages of 1."""
    return pool[:, None]


def paged(pool: torch.Tensor, page_size: int) -> torch.Tensor:
    """A pool of single tokens as pages of ``page_size``; of one where it cannot be divided so."""
    if pool.is_contiguous() and pool.shape[0] % page_size == 0:
        return pool.view(-1, page_size, *pool.shape[1:])
    return flat(pool)


def read(pool: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """``[n, kv_heads, head_dim]`` rows of a pool view at ``slots [n]``."""
    size = pool.shape[1]
    slots = slots.long()
    if size == 1:  # a third of the time that indexing takes on a CPU
        return pool[:, 0].index_select(0, slots)
    return pool[slots // size, slots % size]


def write(pool: torch.Tensor, slots: torch.Tensor, rows: torch.Tensor) -> None:
    """Put ``rows [n, kv_heads, head_dim]`` at ``slots [n]`` of a pool view, in its dtype."""
    size = pool.shape[1]
    slots = slots.long()
    if size == 1:  # one operation: no page to divide by
        pool[:, 0].index_copy_(0, slots, rows.to(pool.dtype))
        return
    pool[slots // size, slots % size] = rows.to(pool.dtype)
