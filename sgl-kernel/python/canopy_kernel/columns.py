"""Position-causal attention of sorted sparse queries on a CPU in fp32, with scores kept by column.

Scores lie transposed, keys by queries: both matrix products then run at the processor's full
speed, a block's last keys are its last rows, and a tile stays in the cache between them. Weights
are ``exp(score)`` as they are, divided by their sum at the end: no maximum is looked for. fp32 holds
that unless a score lies beyond about 69; the sums tell, and such rows are done by
:mod:`.halves` instead.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from canopy_kernel import halves

ROWS = 144
"""Queries times group in a block, about: fewer waste products, more waste keys."""
TILE = 256 * 1024
"""Scores in flight, 1 MB: a core's cache."""
RANGE = 1e30
"""Sums beyond this or its inverse are not trusted."""


@dataclass(frozen=True, slots=True)
class Block:
    """Queries ``first..last``: keys before ``seen`` are visible to all of them, from ``stop`` on to none.

    visible: ``[stop - seen, (last - first) * group]``, 1 or 0, for the keys between.
    """

    first: int
    last: int
    seen: int
    stop: int
    visible: torch.Tensor


@dataclass(frozen=True, slots=True)
class Plan:
    """Blocks for sorted ``positions [m]``; the same for every layer. group: query heads a KV head."""

    positions: torch.Tensor
    group: int
    blocks: tuple[Block, ...]


def plan(positions: torch.Tensor, group: int) -> Plan:
    """Cut sorted, distinct positions into blocks."""
    count, m, blocks = min(64, max(32, ROWS // group // 16 * 16)), positions.numel(), []
    for first in range(0, m, count):
        last = min(first + count, m)
        part = positions[first:last]
        seen, stop = int(part[0]) + 1, int(part[-1]) + 1
        visible = torch.arange(seen, stop)[:, None] <= part.repeat_interleave(group)
        blocks.append(Block(first, last, seen, stop, visible.float()))
    return Plan(positions, group, tuple(blocks))


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, plan: Plan, scale: float
) -> torch.Tensor:
    """fp32 ``q [m, heads, d]`` over ``k, v [n, kv_heads, d]`` in position order -> ``[m, heads, d]``."""
    m, heads, dim = q.shape
    kv_heads, group = k.shape[1], plan.group
    rows = (q * scale).view(m, kv_heads, group, dim)
    keys, values = k.transpose(0, 1), v.permute(1, 2, 0)
    out = torch.empty(m, kv_heads, group, dim)
    buffer, low, high = torch.empty(TILE), RANGE, 0.0
    for b in plan.blocks:
        width = (b.last - b.first) * group
        columns = rows[b.first : b.last].permute(1, 3, 0, 2).reshape(kv_heads, dim, width)
        found = torch.empty(kv_heads, dim, width)
        for head in range(kv_heads):
            total = _one(keys[head], values[head], columns[head], b, found[head], buffer)
            found[head] /= total
            low, high = min(low, float(total.min())), max(high, float(total.max()))
        out[b.first : b.last] = found.view(kv_heads, dim, -1, group).permute(2, 0, 3, 1)
    if m and not 1 / RANGE < low <= high < RANGE:  # not a number is not in the range either
        return halves.attend(q, k, v, halves.plan(plan.positions, group, q.dtype), scale)
    return out.view(m, heads, dim)


def _one(
    key: torch.Tensor,
    value: torch.Tensor,
    columns: torch.Tensor,
    b: Block,
    out: torch.Tensor,
    buffer: torch.Tensor,
) -> torch.Tensor:
    """One block of one KV head: weighted values into ``out [d, width]``; returns the sums ``[width]``."""
    width = columns.shape[1]
    step, total = max(64, TILE // width // 16 * 16), torch.zeros(width)
    if step * width > buffer.numel():
        buffer = torch.empty(step * width)
    for start in range(0, b.stop, step):
        stop = min(b.stop, start + step)
        score = buffer[: (stop - start) * width].view(stop - start, width)
        torch.mm(key[start:stop], columns, out=score)
        score.exp_()
        if stop > b.seen:
            hidden = max(b.seen, start)
            score[hidden - start :] *= b.visible[hidden - b.seen : stop - b.seen]
        total += score.sum(0)
        if start:
            out.addmm_(value[:, start:stop], score)
        else:
            torch.mm(value[:, :stop], score, out=out)
    return total
