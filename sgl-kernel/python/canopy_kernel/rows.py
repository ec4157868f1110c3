"""What the kernels that move KV rows share: page addressing, and rotation on the way."""

from __future__ import annotations

import torch

from canopy_kernel.triton_shim import tl, triton


def rotated(raw_k: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """``[n, kv_heads, d]`` keys turned by a ``[n, d]`` cos-sin table (half-split), in fp32."""
    cos, sin = table.float()[:, None].chunk(2, dim=-1)
    half = cos.shape[-1]
    a, b = raw_k[..., :half].float(), raw_k[..., half:].float()
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


Turns = tuple[torch.Tensor, torch.Tensor]
"""What :func:`turned` multiplies rows and their swapped halves by, each ``[n, heads, d]`` fp32."""


def turns(table: torch.Tensor, heads: int) -> Turns:
    """A cos-sin ``table [n, d]`` as factors as long as the rows that they turn: no head is broadcast
    and no half taken alone, which costs a CPU three times as much.
    """
    cos, sin = table.float().chunk(2, dim=-1)
    both = torch.cat([cos, cos], dim=-1), torch.cat([-sin, sin], dim=-1)
    one, other = (x[:, None].repeat(1, heads, 1) for x in both)
    return one, other


def turned(x: torch.Tensor, by: Turns, out: torch.Tensor | None = None) -> torch.Tensor:
    """``x [n, heads, d]`` fp32 turned, into ``out`` where that is given, which must not overlap it."""
    out = torch.mul(x, by[0], out=out)
    return out.addcmul_(x.roll(x.shape[-1] // 2, -1), by[1])


def warps(dim: int) -> int:
    """Warps of a program that moves rows: at head size 256 four would spill."""
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
    """Rotate both halves by cos and sin; zeros where those are zero."""
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
