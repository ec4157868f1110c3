"""Sparse prefill with stock paged kernels: unmasked keys before a block, and a masked span.

Sorted queries are cut into blocks. All queries of a block attend to all keys before the block's first
position. That part is a virtual request for a non-causal paged prefill kernel, with a prefix of the real
request's pages. A small masked kernel covers the span, the keys between the block's first and last
position. The two parts are merged exactly by their log-sum-exp.

FlashInfer, FA3 and a torch implementation of their contract share one planner of page lists, so that CPU
tests cover the code that a GPU runs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from canopy_kernel import pages
from canopy_kernel.ragged import Rows
from canopy_kernel.triton_attention import span_triton

BLOCK = 64
"""Default queries per block, for kernels without an attribute ``block``. Fewer give longer page lists,
more give more masked keys; FLOPs are similar from 32 to 128 at r = 0.15 and 4,096 tokens
(benchmark/kernels/floors.py)."""
MAX_PAGES = 1 << 21
"""Maximum pages in the lists of all blocks; longer prompts get larger blocks."""


@dataclass(frozen=True, slots=True)
class Blocks:
    """Virtual requests, one per block of queries: its rows, and the keys before its first position.

    query_starts: ``[b + 1]`` int32 on the host; requests: ``[b]`` real request of each block;
    prefixes: ``[b]`` int32 on the pool's device, keys before each block; queries: maximum per block.
    """

    rows: Rows
    page_size: int
    size: int
    query_starts: torch.Tensor
    requests: tuple[int, ...]
    prefixes: torch.Tensor
    queries: int


@dataclass(frozen=True, slots=True)
class PageLists:
    """Page lists for FlashInfer, all int32: ``starts [b + 1]`` and ``last_page [b]`` on the host,
    ``indices`` of all lists on the device. ``last_page``: keys in a list's last page; 0 for an empty
    list, because FlashInfer's planner adds ``last_page`` for empty lists too."""

    starts: torch.Tensor
    indices: torch.Tensor
    last_page: torch.Tensor


def block_size(
    counts: Sequence[int], lengths: Sequence[int], page_size: int, least: int = BLOCK
) -> int:
    """Return queries per block: ``least``, doubled until the lists have :data:`MAX_PAGES` or fewer."""
    size = least
    while size < max(counts, default=0):
        listed = sum(-(-m // size) * -(-n // page_size) for m, n in zip(counts, lengths))
        if listed <= MAX_PAGES:
            break
        size *= 2
    return size


def blocks(rows: Rows, page_size: int, size: int | None = None, least: int = BLOCK) -> Blocks:
    """Return the virtual requests of ``rows``, of ``size`` queries each (default: :func:`block_size`).

    The host does not wait for data that ``rows`` has on the host. With pages of several tokens,
    position p must be token p % page_size of its page, as in SGLang.
    """
    counts, lengths = rows.sizes()
    size = size or block_size(counts, lengths, page_size, least)
    starts, requests = [0], []
    for i, (qs, _) in enumerate(rows.requests()):
        for first in range(qs.start, qs.stop, size):
            starts.append(min(first + size, qs.stop))
            requests.append(i)
    query_starts = torch.tensor(starts, dtype=torch.int32)
    prefixes = rows.positions[_to(query_starts[:-1], rows.positions.device).long()].int()
    longest = int(query_starts.diff().max()) if requests else 0
    return Blocks(rows, page_size, size, query_starts, tuple(requests), prefixes, longest)


def page_lists(blocks: Blocks) -> PageLists:
    """Return page lists for FlashInfer, which plans on the host. Without ``rows.host_positions``, the
    host waits once per forward for the prefixes."""
    rows, page_size, device = blocks.rows, blocks.page_size, blocks.rows.slots.device
    if rows.host_positions is None:
        prefix = blocks.prefixes.cpu().long()
    else:
        prefix = rows.host_positions[blocks.query_starts[:-1].long()].long()
    counts = -(-prefix // page_size)
    starts = torch.zeros(len(prefix) + 1, dtype=torch.int64)
    torch.cumsum(counts, 0, out=starts[1:])
    total = int(starts[-1])
    keys = [ks.start for _, ks in rows.requests()]
    shift = torch.tensor([keys[r] for r in blocks.requests], dtype=torch.int64)
    shift -= starts[:-1] * page_size
    each = torch.repeat_interleave(_to(shift, device), _to(counts, device), output_size=total)
    at = each + torch.arange(0, total * page_size, page_size, device=device)
    last = torch.where(prefix > 0, (prefix - 1) % page_size + 1, 0)
    return PageLists(starts.int(), (rows.slots[at] // page_size).int(), last.int())


def page_table(blocks: Blocks) -> torch.Tensor:
    """Return a page table for FA3: ``[b, most pages]`` int32 on the device, with the real request's
    pages in each row, of which ``blocks.prefixes`` keys count. The host does not wait."""
    rows, page_size, device = blocks.rows, blocks.page_size, blocks.rows.slots.device
    _, lengths = rows.sizes()
    most = max((-(-lengths[r] // page_size) for r in blocks.requests), default=0)
    starts = [ks.start for _, ks in rows.requests()]
    ends = [ks.stop for _, ks in rows.requests()]
    page = torch.arange(0, max(1, most) * page_size, page_size, device=device)
    first, last = (
        _to(torch.tensor([x[r] for r in blocks.requests], dtype=torch.int64), device)[:, None]
        for x in (starts, [e - 1 for e in ends])
    )
    return (rows.slots[torch.minimum(first + page, last)] // page_size).int()


def _to(host: torch.Tensor, device: torch.device) -> torch.Tensor:
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host


Paged = Callable[
    [torch.Tensor, torch.Tensor, torch.Tensor, Blocks, float],
    tuple[torch.Tensor, torch.Tensor, float],
]
"""A stock kernel, not causal: ``q [m, heads, d]``, both pools, blocks, scale -> ``[m, heads, d]``, its
log-sum-exp ``[m, heads]``, and the factor that converts it to base 2. Results of blocks without keys are
ignored."""


def paged_torch(
    q: torch.Tensor, k_pool: torch.Tensor, v_pool: torch.Tensor, blocks: Blocks, scale: float
) -> tuple[torch.Tensor, torch.Tensor, float]:
    """Implement FlashInfer's paged prefill in plain torch: page lists, base 2."""
    lists = blocks.rows.once(("page lists", blocks.size), lambda: page_lists(blocks))
    starts, last = lists.starts.tolist(), lists.last_page.tolist()
    chosen = [
        (lists.indices[a:b], (b - a - 1) * blocks.page_size + end)
        for a, b, end in zip(starts, starts[1:], last)
    ]
    out, lse = _attend_pages(q, k_pool, v_pool, blocks, chosen, scale)
    return out, lse / math.log(2), 1.0


def paged_torch_table(
    q: torch.Tensor, k_pool: torch.Tensor, v_pool: torch.Tensor, blocks: Blocks, scale: float
) -> tuple[torch.Tensor, torch.Tensor, float]:
    """Implement FA3's paged attention in plain torch: page table and lengths, base e."""
    chosen = list(zip(page_table(blocks), blocks.prefixes.tolist()))
    return *_attend_pages(q, k_pool, v_pool, blocks, chosen, scale), 1.0 / math.log(2)


def _attend_pages(
    q: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    blocks: Blocks,
    chosen: Sequence[tuple[torch.Tensor, int]],
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend from each block to the keys of its pages; blocks without keys give NaN."""
    out = torch.full_like(q, float("nan"))
    lse = torch.full(q.shape[:2], float("nan"), device=q.device)
    starts = blocks.query_starts.tolist()
    for i, (listed, keys) in enumerate(chosen):
        if not len(listed) or keys <= 0:
            continue
        some = slice(starts[i], starts[i + 1])
        k, v = (pool[listed.long()].flatten(0, 1)[:keys].float() for pool in (k_pool, v_pool))
        group = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        score = torch.einsum("mhd,nhd->mhn", q[some].float(), k) * scale
        out[some] = torch.einsum("mhn,nhd->mhd", score.softmax(-1), v).to(q.dtype)
        lse[some] = score.logsumexp(-1)
    return out, lse


def span_torch(
    q: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    rows: Rows,
    scale: float,
    block: int,
    before: tuple[torch.Tensor, torch.Tensor, float],
) -> torch.Tensor:
    """Compute the masked spans in plain torch, merged with ``before``: the reference of
    :func:`canopy_kernel.triton_attention.span_triton`."""
    out = torch.empty_like(q)
    earlier, lse, factor = before
    for qs, ks in rows.requests():
        for first in range(qs.start, qs.stop, block):
            some = slice(first, min(first + block, qs.stop))
            at = rows.positions[some]
            low, high = int(at[0]), int(at[-1]) + 1
            slots = rows.slots[ks][low:high]
            k, v = (pages.read(pool, slots).float() for pool in (k_pool, v_pool))
            group = q.shape[1] // k.shape[1]
            k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
            score = torch.einsum("mhd,nhd->mhn", q[some].float(), k) * scale
            hidden = torch.arange(low, high, device=q.device) > at[:, None]
            score = score.masked_fill(hidden[:, None], float("-inf"))
            part = torch.einsum("mhn,nhd->mhd", score.softmax(-1), v)
            if low:
                weight = torch.sigmoid(score.logsumexp(-1) - lse[some] * factor * math.log(2))
                part = torch.lerp(earlier[some].float(), part, weight[..., None])
            out[some] = part.to(q.dtype)
    return out


def decomposed(
    q: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    rows: Rows,
    scale: float,
    paged: Paged = paged_torch,
    size: int | None = None,
) -> torch.Tensor:
    """Compute attention by a paged kernel and masked spans (Triton on CUDA).

    Arguments as :func:`canopy_kernel.attention.reference`; ``paged``: the kernel; ``size``: queries per
    block. Blocks are computed once for all layers.
    """
    if q.shape[0] == 0:
        return torch.empty_like(q)
    page_size = k_pool.shape[1]
    least = getattr(paged, "block", BLOCK)
    key = ("blocks", page_size, size, least)
    cut = rows.once(key, lambda: blocks(rows, page_size, size, least))
    q = q.contiguous()
    before = paged(q, k_pool, v_pool, cut, scale)
    span = span_triton if q.is_cuda else span_torch
    return span(q, k_pool, v_pool, rows, scale, cut.size, before)
