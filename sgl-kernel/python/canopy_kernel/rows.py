"""Shared functions of the kernels that move KV rows: page addressing and rotation."""

from __future__ import annotations

from typing import NamedTuple

import torch

from canopy_kernel.triton_shim import tl, triton


def rotate(raw_k: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """Return ``[n, kv_heads, d]`` keys rotated by a ``[n, d]`` cos-sin table (half-split), in fp32."""
    cos, sin = table.float()[:, None].chunk(2, dim=-1)
    half = cos.shape[-1]
    low, high = raw_k[..., :half].float(), raw_k[..., half:].float()
    return torch.cat([low * cos - high * sin, high * cos + low * sin], dim=-1)


class RotationFactors(NamedTuple):
    """Factors of rows (``cos``) and of their swapped halves (``sin``), each ``[n, heads, d]`` fp32."""

    cos: torch.Tensor
    sin: torch.Tensor


def rotation_factors(table: torch.Tensor, heads: int) -> RotationFactors:
    """Expand a cos-sin ``table [n, d]`` to factors of the rows' full shape.

    Broadcasting heads or slicing halves would take three times as long on a CPU.
    """
    cos, sin = table.float().chunk(2, dim=-1)
    halves = torch.cat([cos, cos], dim=-1), torch.cat([-sin, sin], dim=-1)
    return RotationFactors(*(x[:, None].repeat(1, heads, 1) for x in halves))


def rotate_by(
    x: torch.Tensor, factors: RotationFactors, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Rotate ``x [n, heads, d]`` (fp32), into ``out`` if given; ``out`` must not overlap ``x``."""
    out = torch.mul(x, factors.cos, out=out)
    return out.addcmul_(x.roll(x.shape[-1] // 2, -1), factors.sin)


def warps_per_program(dim: int) -> int:
    """Return the warps of a program that moves rows: at head size 256 four would spill."""
    return 4 if dim <= 128 else 8


@triton.jit
def load_halves(ptr, row, row_stride, head, dims, mask, DIM: tl.constexpr):
    """Return both halves of a head of rows ``[block]``, fp32; zeros where the mask is off."""
    offset = row[:, None] * row_stride + head * DIM + dims[None, :]
    low = tl.load(ptr + offset, mask=mask, other=0.0).to(tl.float32)
    high = tl.load(ptr + offset + DIM // 2, mask=mask, other=0.0).to(tl.float32)
    return low, high


@triton.jit
def load_angles(table_ptr, position, dims, mask, DIM: tl.constexpr):
    """Return cos and sin of ``position [block]``, once for all heads of a token."""
    angle = position[:, None] * DIM + dims[None, :]
    cos = tl.load(table_ptr + angle, mask=mask, other=0.0).to(tl.float32)
    sin = tl.load(table_ptr + angle + DIM // 2, mask=mask, other=0.0).to(tl.float32)
    return cos, sin


@triton.jit
def rotate_halves(low, high, cos, sin):
    """Rotate both halves by cos and sin; zero angles give zeros."""
    return low * cos - high * sin, high * cos + low * sin


@triton.jit
def _pool_offset(slot, head, dims, page_stride, token_stride, head_stride, PAGE: tl.constexpr):
    row_offset = (slot // PAGE) * page_stride + (slot % PAGE) * token_stride + head * head_stride
    return row_offset[:, None] + dims[None, :]


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
    offset = _pool_offset(slot, head, dims, page_stride, token_stride, head_stride, PAGE)
    dtype = pool_ptr.dtype.element_ty
    tl.store(pool_ptr + offset, low.to(dtype), mask=mask)
    tl.store(pool_ptr + offset + DIM // 2, high.to(dtype), mask=mask)
