"""Sparse prefill by stock paged kernels: the keys before a block without a mask, its span apart.

Sorted queries are cut into blocks. Every query of a block sees all keys before the block's first
position: a request of its own for a paged prefill kernel, not causal, whose pages are a prefix of
the real request's. What is left, the keys between the block's first and last position, goes
through a small masked kernel. The two are joined by their log-sum-exp, which is exact.

The planner of page lists is one for FlashInfer, FA3 and the torch stand-in of their contract, so
that a CPU proves what a GPU then runs.
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
"""Queries a block, where the stock kernel does not say (its attribute ``block``). Fewer mean longer
page lists, more mean more masked keys: about alike in FLOPs from 32 to 128 at r = 0.15 and 4,096
tokens (benchmark/kernels/floors.py)."""
MOST_PAGES = 1 << 21
"""Pages in all blocks' lists together; longer prompts get larger blocks."""


@dataclass(frozen=True, slots=True)
class Blocks:
    """One virtual request a block of queries: its rows, and the keys before its first position.

    query_starts: ``[b + 1]`` int32 on the host; requests: ``[b]`` the real request of each;
    prefixes: ``[b]`` int32 on the pool's device, keys before each block; queries: the most of any.
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
    """FlashInfer's form, all int32: ``starts [b + 1]`` and ``last_page [b]`` on the host,
    ``indices`` of all lists on the device. ``last_page``: keys in a list's last page; 0 where
    there is no page, since FlashInfer's planner adds it there too."""

    starts: torch.Tensor
    indices: torch.Tensor
    last_page: torch.Tensor


def block_size(
    counts: Sequence[int], lengths: Sequence[int], page_size: int, least: int = BLOCK
) -> int:
    """Queries a block: ``least``, doubled until all lists have at most :data:`MOST_PAGES`."""
    size = least
    while size < max(counts, default=0):
        listed = sum(-(-m // size) * -(-n // page_size) for m, n in zip(counts, lengths))
        if listed <= MOST_PAGES:
            break
        size *= 2
    return size


def blocks(rows: Rows, page_size: int, size: int | None = None, least: int = BLOCK) -> Blocks:
    """The virtual requests of ``rows``, of ``size`` queries each, or by :func:`block_size`. The host waits for nothing that
    ``rows`` has there.

    Pages of more than one token need each request's slots to fill them in order, as SGLang's do:
    position p is token p % page_size of its page.
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
    """FlashInfer plans on the host, so prefixes are read there: one wait a forward, where
    ``rows.host_positions`` is not given."""
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
    """FA3's form: ``[b, most pages]`` int32 on the device, the real request's pages in each row;
    how many count is said by ``blocks.prefixes``. The host waits for nothing."""
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
"""A stock kernel: ``q [m, heads, d]``, both pools, blocks, scale -> ``[m, heads, d]``, its
log-sum-exp ``[m, heads]``, and the factor that makes it one of base 2. Not causal. What it gives
for a block without keys is not looked at."""


def paged_torch(
    q: torch.Tensor, k_pool: torch.Tensor, v_pool: torch.Tensor, blocks: Blocks, scale: float
) -> tuple[torch.Tensor, torch.Tensor, float]:
    """The contract of FlashInfer's paged prefill in plain torch: page lists, base 2."""
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
    """The contract of FA3's paged attention in plain torch: a table and lengths, base e."""
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
    """Each block over the keys of its pages; a block without keys is left as it must not be read."""
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
    """Reference of :func:`canopy_kernel.triton_attention.span_triton`: the masked spans in plain
    torch, joined with what was before them."""
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
    """Arguments as :func:`canopy_kernel.attention.reference`; ``paged``: the kernel to use; ``size``:
    queries a block. Blocks are made once for all layers; spans run in Triton on CUDA."""
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
