"""Position-causal sparse prefill attention: queries anywhere in a row, keys at or before them.

A query at position p sees the keys of positions 0..p of its own request, nothing else: the mask
goes by position, never by row index. Queries of a request are sorted by position, so a block of
them bounds the keys it must read and no dense mask exists.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from canopy_kernel import halves, pages
from canopy_kernel.triton_shim import tl, triton


@dataclass(frozen=True, slots=True)
class Rows:
    """Which keys and which queries belong to which request of a batch.

    positions: ``[m]`` int, true positions of all queries, sorted inside each request;
    query_starts: ``[b + 1]`` int32, prefix sums of queries a request;
    slots: ``[sum of lengths]`` int, pool slot of every key, in position order;
    key_starts: ``[b + 1]`` int32, prefix sums of keys a request;
    longest: the most queries any request has (a host number: no device sync to launch).
    """

    positions: torch.Tensor
    query_starts: torch.Tensor
    slots: torch.Tensor
    key_starts: torch.Tensor
    longest: int

    @staticmethod
    def one(positions: torch.Tensor, slots: torch.Tensor) -> Rows:
        """A batch of one request."""
        device = positions.device
        q = torch.tensor([0, positions.numel()], dtype=torch.int32, device=device)
        k = torch.tensor([0, slots.numel()], dtype=torch.int32, device=device)
        return Rows(positions, q, slots, k, positions.numel())

    def requests(self) -> list[tuple[slice, slice]]:
        """Query and key slices of each request (reads the prefix sums on the host)."""
        q, k = self.query_starts.tolist(), self.key_starts.tolist()
        return [(slice(a, b), slice(c, d)) for a, b, c, d in zip(q[:-1], q[1:], k[:-1], k[1:])]


def reference(
    q: torch.Tensor, k_pool: torch.Tensor, v_pool: torch.Tensor, rows: Rows, scale: float
) -> torch.Tensor:
    """Dense masked attention in fp32. ``q [m, heads, d]`` -> ``[m, heads, d]`` in q's dtype."""
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
"""Of each request its queries, its keys and the CPU path's steps. The same for every layer."""


def plan(q: torch.Tensor, k_pool: torch.Tensor, rows: Rows) -> Plan:
    """What :func:`blocked` does for ``rows``; ``q`` and ``k_pool`` give head counts and dtype."""
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
    """The CPU path: queries halved until a mask is small (:mod:`.halves`), as ``planned``."""
    out = torch.empty_like(q)
    for qs, ks, steps in plan(q, k_pool, rows) if planned is None else planned:
        slots = rows.slots[ks]
        k, v = (pages.read(pool, slots).to(q.dtype) for pool in (k_pool, v_pool))
        out[qs] = halves.attend(q[qs], k, v, steps, scale)
    return out


@triton.jit
def _sparse_prefill_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    positions_ptr,
    query_starts_ptr,
    slots_ptr,
    key_starts_ptr,
    scale_log2,
    q_row,
    q_head,
    k_page,
    k_token,
    k_head,
    v_page,
    v_token,
    v_head,
    GROUP: tl.constexpr,
    PAGE: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
    IEEE: tl.constexpr,
    WIDE: tl.constexpr,
):
    request = tl.program_id(2)
    head = tl.program_id(1)
    start = tl.load(query_starts_ptr + request)
    end = tl.load(query_starts_ptr + request + 1)
    first = start + tl.program_id(0) * BLOCK_Q
    if first >= end:
        return
    rows = first + tl.arange(0, BLOCK_Q)
    alive = rows < end
    dims = tl.arange(0, DIM)
    position = tl.load(positions_ptr + rows, mask=alive, other=-1).to(tl.int32)
    q = tl.load(
        q_ptr + rows[:, None] * q_row + head * q_head + dims, mask=alive[:, None], other=0.0
    )
    kind: tl.constexpr = q_ptr.dtype.element_ty
    if WIDE:  # Triton's interpreter multiplies the raw bits of bf16: widen there, exactly
        q = q.to(tl.float32)
    kv_head = head // GROUP
    base = tl.load(key_starts_ptr + request)
    # Sorted positions: the block's last live query bounds the keys anyone in it may read.
    stop = tl.max(position, axis=0) + 1
    peak = tl.full([BLOCK_Q], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_Q], tl.float32)
    acc = tl.zeros([BLOCK_Q, DIM], tl.float32)
    for at in range(0, stop, BLOCK_K):
        key = at + tl.arange(0, BLOCK_K)
        inside = key < stop
        slot = tl.load(slots_ptr + base + key, mask=inside, other=0).to(tl.int64)
        page = slot // PAGE
        offset = slot % PAGE
        k = tl.load(
            k_ptr + (page * k_page + offset * k_token)[None, :] + kv_head * k_head + dims[:, None],
            mask=inside[None, :],
            other=0.0,
        ).to(q.dtype)
        if IEEE:
            score = tl.dot(q, k, input_precision="ieee") * scale_log2
        else:
            score = tl.dot(q, k) * scale_log2
        score = tl.where(key[None, :] <= position[:, None], score, float("-inf"))
        high = tl.maximum(peak, tl.max(score, axis=1))
        # A dead row has seen no key: keep its peak finite so that exp2 gives 0, not NaN.
        safe = tl.where(high == float("-inf"), 0.0, high)
        weight = tl.exp2(score - safe[:, None])
        decay = tl.exp2(peak - safe)
        total = total * decay + tl.sum(weight, axis=1)
        v = tl.load(
            v_ptr + (page * v_page + offset * v_token)[:, None] + kv_head * v_head + dims[None, :],
            mask=inside[:, None],
            other=0.0,
        ).to(q.dtype)
        acc = acc * decay[:, None]
        if IEEE:
            acc += tl.dot(weight.to(kind).to(q.dtype), v, input_precision="ieee")
        else:
            acc += tl.dot(weight.to(kind), v)
        peak = high
    acc = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    tl.store(
        out_ptr + rows[:, None] * q_row + head * q_head + dims,
        acc.to(out_ptr.dtype.element_ty),
        mask=alive[:, None],
    )


def blocks(dim: int, dtype: torch.dtype) -> tuple[int, int, int, int]:
    """(queries a block, keys a block, warps, stages): fits the shared memory of sm_80 and sm_90."""
    if dtype == torch.float32:
        return {64: (32, 32, 4, 1), 128: (16, 32, 8, 1)}.get(dim, (16, 16, 4, 1))
    return {64: (64, 64, 4, 2), 128: (64, 64, 8, 2)}.get(dim, (64, 32, 8, 2))


def sparse_prefill_triton(
    q: torch.Tensor, k_pool: torch.Tensor, v_pool: torch.Tensor, rows: Rows, scale: float
) -> torch.Tensor:
    """The Triton kernel (CUDA, or the interpreter on a CPU). Same arguments as :func:`reference`."""
    q = q.contiguous()
    out = torch.empty_like(q)
    m, heads, dim = q.shape
    if m == 0:
        return out
    block_q, block_k, warps, stages = blocks(dim, q.dtype)
    wide = q.dtype == torch.bfloat16 and not q.is_cuda
    grid = (triton.cdiv(rows.longest, block_q), heads, rows.query_starts.numel() - 1)
    _sparse_prefill_kernel[grid](
        q,
        k_pool,
        v_pool,
        out,
        rows.positions,
        rows.query_starts,
        rows.slots,
        rows.key_starts,
        scale * 1.4426950408889634,
        q.stride(0),
        q.stride(1),
        *k_pool.stride()[:3],
        *v_pool.stride()[:3],
        GROUP=heads // k_pool.shape[2],
        PAGE=k_pool.shape[1],
        DIM=dim,
        BLOCK_Q=block_q,
        BLOCK_K=block_k,
        IEEE=q.dtype == torch.float32 or wide,
        WIDE=wide,
        num_warps=warps,
        num_stages=stages,
    )
    return out


def sparse_prefill(
    q: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    rows: Rows,
    scale: float,
    backend: str = "auto",
) -> torch.Tensor:
    """Attention of sparse rows over a paged cache.

    q: ``[m, heads, d]``; pools: views ``[pages, page_size, kv_heads, d]`` that already hold the
    recomputed rows; returns ``[m, heads, d]``. backend: ``auto``, ``triton``, ``flashinfer``
    (customised attention by position), ``flashinfer-mask``, ``blocked`` (torch) or ``reference``.
    """
    if backend == "auto":
        backend = "triton" if q.is_cuda else "blocked"
    if backend in ("flashinfer", "flashinfer-mask"):
        from canopy_kernel.flashinfer_attention import sparse_prefill_flashinfer

        how = "mask" if backend.endswith("mask") else "positions"
        return sparse_prefill_flashinfer(q, k_pool, v_pool, rows, scale, how)
    paths = {"triton": sparse_prefill_triton, "blocked": blocked, "reference": reference}
    if backend not in paths:
        raise ValueError(
            f"backend {backend!r}: allowed are auto, flashinfer, flashinfer-mask, "
            f"{', '.join(paths)}"
        )
    return paths[backend](q, k_pool, v_pool, rows, scale)
