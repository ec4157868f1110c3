"""Query-aware: what the question's tokens attend to over the reused KV, in some middle layers."""

from __future__ import annotations

import math

import torch

from sglang_canopy.chunk import engine
from sglang_canopy.chunk.selectors.base import Choice, Context, Selector, join, over_chunks, top

FIRST, LAST = 0.4, 0.8
"""The probed layers, as shares of the depth (measured in docs/chunks.md)."""
MOST = 64
"""Question tokens probed at most, the last ones."""


def query_scores(context: Context, most: int = MOST, last_weight: float = 0.0) -> torch.Tensor:
    """``[prompt]`` attention mass from the last ``most`` question tokens, over layers and heads.

    Runs the rows outside chunks alone, through the first ``LAST`` of the layers, over reused KV.
    ``last_weight`` is the share of the very last token's attention in the sum, the other tokens'
    together having the rest; 0 counts every token alike.
    """
    model, prompt, cache = context.model, context.prompt, context.cache
    shape = model.shape
    outside = (~prompt.in_chunk()).nonzero()[:, 0]
    outside = outside[outside >= context.ready]
    tail = prompt.tail()
    probed = tail[-most:]
    lowest, depth = int(FIRST * shape.layers), max(1, math.ceil(LAST * shape.layers))
    score = torch.zeros(len(prompt), device=model.device)
    rows = torch.cat([outside, tail]).unique().to(model.device)
    begin = int(probed[0])

    def watch(layer: int, q: torch.Tensor, positions: torch.Tensor) -> None:
        if layer < lowest:
            return
        asking = positions >= begin
        q, at = q[asking].float(), positions[asking]
        n = len(prompt)
        k = (
            cache.k[layer][:n, 0]
            if cache.in_order
            else cache.read(layer, torch.arange(n, device=q.device))[0]
        )
        group = shape.heads // shape.kv_heads
        grouped = q.view(-1, shape.kv_heads, group, shape.head_dim)
        grouped = grouped.permute(1, 0, 2, 3).reshape(shape.kv_heads, -1, shape.head_dim)
        weight = torch.matmul(grouped, k.float().permute(1, 2, 0)) * shape.head_dim**-0.5
        hidden = torch.arange(n, device=q.device) > at[:, None]
        weight = weight.view(shape.kv_heads, -1, group, n).masked_fill(
            hidden[None, :, None], float("-inf")
        )
        mass = torch.softmax(weight, dim=-1).sum(dim=(0, 2))
        if last_weight and mass.shape[0] > 1:
            rest = mass[:-1].mean(dim=0)
            score.add_(last_weight * mass[-1] + (1 - last_weight) * rest)
        else:
            score.add_(mass.sum(dim=0))

    engine.run_rows(model, prompt.ids[rows], rows, cache, watch=watch, layers=depth)
    return score.cpu()


class Query(Selector):
    """The whole budget on what the question attends to, over all chunks together."""

    name = "query"
    reads_cache = True

    def choose(self, context: Context) -> Choice:
        return Choice(over_chunks(context.prompt, query_scores(context), context.budget))


class HeadQuery(Selector):
    """Half the budget on the chunks' first tokens, half on what the question attends to."""

    name = "head+query"
    reads_cache = True

    def choose(self, context: Context) -> Choice:
        return with_heads(context, query_scores(context), 0.5)


def with_heads(context: Context, score: torch.Tensor, share: float, skip: int = 0) -> Choice:
    """``share`` of the budget on first tokens of chunks (from the ``skip``-th on), then by score."""
    prompt, heads = context.prompt, []
    for p in prompt.placed[skip:]:
        count = math.floor(share * context.ratio * len(p.chunk))
        heads.append(torch.arange(p.start, p.start + count))
    head, score = join(heads), score.clone()
    score[~prompt.in_chunk()] = float("-inf")
    score[head] = float("-inf")
    for p in prompt.placed[:skip]:
        score[p.start : p.end] = float("-inf")
    count = min(context.budget - head.numel(), int(torch.isfinite(score).sum()))
    return Choice(join([head, top(score, count)]))
