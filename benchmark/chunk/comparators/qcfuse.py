"""After QCFuse (arXiv 2606.05875), from its abstract and published description, not its code:
attention from a question that has read a compressed view of the chunks.

Offline each chunk has anchors: at each layer the tokens that get the most attention while the model
repeats the chunk (KVzip). The question's rows run up to the deepest profiled layer and read the head,
the anchors and themselves. At the profiled layers every chunk token is scored by the softmax over all
keys, averaged over rows, heads and layers. As ``question`` does, it leaves out a first chunk that is exact.
"""

from __future__ import annotations

import math

import torch

from canopy_chunks.fuse import rows as engine
from canopy_chunks.fuse.cache import KVCache, dense_cache
from canopy_chunks.fuse.model import Model
from canopy_chunks.fuse.placement import place_chunks
from canopy_chunks.fuse.selectors.base import Context, SelectedTokens, Selector, best
from canopy_chunks.store.chunk import Chunk, Placed

ANCHORS = 0.15
"""Share of a chunk's tokens that are its anchors (the published default)."""
DEPTHS = (0.5, 0.54, 0.57)
"""Profiled layers, as shares of the depth: of SmolLM2-135M's, 15, 16 and 17 of 30, whose attention alone
chose best on two questions of MuSiQue."""
REPEAT = "\n\nRepeat the previous context exactly.\n\n"


class QCFuse(Selector):
    """Spend the budget on the chunk tokens with the most attention from the question at the profiled layers."""

    name = "qcfuse"
    reads_cache = True
    repeat: tuple[int, ...] = ()
    """Tokens of ``REPEAT`` by the model's tokenizer."""

    def choose(self, context: Context) -> SelectedTokens:
        prompt = context.prompt
        allowed = prompt.in_chunk()
        allowed[len(prompt) - 1] = False
        if prompt.first_is_exact:
            allowed[prompt.placed[0].start : prompt.placed[0].end] = False
        return SelectedTokens(best(scores(context, self.repeat), allowed, context.budget))


def scores(context: Context, repeat: tuple[int, ...] = ()) -> torch.Tensor:
    """Return ``[prompt]``: mean attention weight from the question at the profiled layers."""
    model, prompt, cache = context.model, context.prompt, context.cache
    tail, start = prompt.tail(), prompt.placed[0].start
    layers = {int(depth * model.shape.layers) for depth in DEPTHS}
    before = torch.arange(context.ready, start)
    every, count = torch.arange(len(prompt)), before.numel()
    views = [(p.start, repeated_attention(model, p.chunk, repeat)) for p in prompt.placed]
    score = torch.zeros(len(prompt))

    def watch(layer: int, q: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
        anchors = [
            mass[layer].topk(math.ceil(ANCHORS * mass.shape[1])).indices.sort()[0] + at
            for at, mass in views
        ]
        if layer in layers:
            weight = weights(cache, layer, q[count:], tail, every)[0]
            score.add_(weight.mean(dim=(0, 1, 2)), alpha=1 / len(layers))
        out = torch.empty_like(q)
        if count:
            out[:count] = cache.attend(layer, q[:count], before, q.shape[-1] ** -0.5)
        seen = torch.cat([torch.arange(start), *anchors, tail]).unique()
        weight, v = weights(cache, layer, q[count:], tail, seen)
        out[count:] = torch.einsum("mhgn,nhd->mhgd", weight, v.float()).flatten(1, 2)
        return out

    rows = torch.cat([before, tail])
    engine.probe_rows(model, prompt.ids[rows], rows, cache, max(layers), watch)
    return score


def repeated_attention(model: Model, chunk: Chunk, repeat: tuple[int, ...]) -> torch.Tensor:
    """Return ``[layers, n]``: a token's largest attention weight, over rows and heads, while the chunk is
    repeated behind itself. Stored with the chunk."""
    if "qcfuse" not in chunk.scores:
        n = len(chunk)
        ids = [*chunk.ids, *repeat, *chunk.ids]
        cache, every = dense_cache(model, len(ids)), torch.arange(len(ids))
        place_chunks(model, (Placed(chunk, 0),), cache, every < n)
        mass = torch.zeros(model.shape.layers, n)

        def watch(layer: int, q: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
            weight, v = weights(cache, layer, q, at, every)
            mass[layer] = weight[..., :n].amax(dim=(0, 1, 2))
            attended = torch.einsum("mhgn,nhd->mhgd", weight, v.float())
            return attended.flatten(1, 2).to(q.dtype)

        engine.run_rows(model, torch.tensor(ids[n:]), every[n:], cache, watch=watch)
        chunk.scores["qcfuse"] = mass
    return chunk.scores["qcfuse"]


def weights(
    cache: KVCache, layer: int, q: torch.Tensor, at: torch.Tensor, seen: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the causal softmax ``[m, kv_heads, group, keys]`` of rows ``q [m, heads, d]`` at positions
    ``at`` over the keys at ``seen``, and these keys' values."""
    k, v = cache.read(layer, seen)
    rows = (q.float() * q.shape[-1] ** -0.5).unflatten(1, (k.shape[1], -1))
    weight = torch.einsum("mhgd,nhd->mhgn", rows, k.float())
    hidden = (seen > at[:, None])[:, None, None]
    return weight.masked_fill(hidden, float("-inf")).softmax(-1), v
