"""Shared functions of the kernels that move KV rows: page addressing and rotation."""

from __future__ import annotations

import torch

from canopy_kernel.triton_shim import tl, triton


def rotated(raw_k: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """Return ``[n, kv_heads, d]`` keys rotated by a ``[n, d]`` cos-sin table (half-split), in fp32."""
    cos, sin = table.float()[:, None].chunk(2, dim=-1)
    half = cos.shape[-1]
    a, b = raw_k[..., :half].float(), raw_k[..., half:].float()
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


Turns = tuple[torch.Tensor, torch.Tensor]
"""Factors of rows and of their swapped halves in :func:`rotate_by`, each ``[n, heads, d]`` fp32."""


def rotation_factors(table: torch.Tensor, heads: int) -> Turns:
    """Expand a cos-sin ``table [n, d]`` to factors of the rows' full shape.

    Broadcasting heads or slicing halves would take three times as long on a CPU.
    """
    cos, sin = table.float().chunk(2, dim=-1)
    both = torch.cat([cos, cos], dim=-1), torch.cat([-sin, sin], dim=-1)
    cos_rows, sin_rows = (x[:, None].repeat(1, heads, 1) for x in both)
    return cos_rows, sin_rows


def rotate_by(x: torch.Tensor, by: Turns, out: torch.Tensor | None = None) -> torch.Tensor:
    """Rotate ``x [n, heads, d]`` (fp32), into ``out`` if given; ``out`` must not overlap ``x``."""
    out = torch.mul(x, by[0], out=out)
    return out.addcmul_(x.roll(x.shape[-1] // 2, -1), by[1])


def warps(dim: int) -> int:
    """Return the warps of a program that moves rows: at head size 256 four would spill."""
    return 4 if dim <= 128 else 8


@triton.jit
def load_halves(ptr, row, row_stride, head, dims, mask, DIM: tl.constexpr):
    """Both halves of a head of rows ``[block]``, fp32; zeros where the mask is off."""
    at = row[:, None] * row_stride + head * DIM + dims[None, :]
    low = tl.load(ptr + at, mask=mask, other=0.0).to(tl.float32)
    high = tl.load(ptr + at + DIM // 2, mask=mask, other=0.0).to(tl.float32)
    return low, high


@triton.jit
def load_angles(table_ptr, position, dims, mask, DIM: tl.constexpr):
    """cos and sin of ``position [block]``, once for all heads of a token."""
    angle = position[:, None] * DIM + dims[None, :]
    cos = tl.load(table_ptr + angle, mask=mask, other=0.0).to(tl.float32)
    sin = tl.load(table_ptr + angle + DIM // 2, mask=mask, other=0.0).to(tl.float32)
    return cos, sin


@triton.jit
def turn(low, high, cos, sin):
    """Rotate both halves by cos and sin; zero angles give zeros."""
    return low * cos - high * sin, high * cos + low * sin


@triton.jit
def _pool_at(slot, head, dims, page_stride, token_stride, head_stride, PAGE: tl.constexpr):
    first = (slot // PAGE) * page_stride + (slot % PAGE) * token_stride + head * head_stride
    return first[:, None] + dims[None, :]


@triton.jit
def store_halves(
    pool_ptr,
    slot,
    head,
    dims,
    low,
    high,
    mask,
    page_stride,
    token_stride,
    head_stride,
    PAGE: tl.constexpr,
    DIM: tl.constexpr,
):
    """Write both halves at ``slot [block]`` of a pool of pages, in the pool's type."""
    at = _pool_at(slot, head, dims, page_stride, token_stride, head_stride, PAGE)
    kind = pool_ptr.dtype.element_ty
    tl.store(pool_ptr + at, low.to(kind), mask=mask)
    tl.store(pool_ptr + at + DIM // 2, high.to(kind), mask=mask)
