"""Figure 3: the question's attention to its context."""

from __future__ import annotations

import torch

from canopy_chunks.fuse import rows as engine
from canopy_chunks.fuse.cache import KVCache
from canopy_chunks.fuse.model import Model

BINS = 96
"""Columns of a heat map: context positions side by side."""


def attention(model: Model, cache: KVCache, ids: torch.Tensor, tail: torch.Tensor) -> torch.Tensor:
    """``[layers, tail, context]``: the question's attention to all before it, the mean of the heads,
    as shares of what goes there. The first token, which gets most of it, is excluded."""
    shape, end = model.shape, int(tail[0])
    before, found = torch.arange(1, end), []
    group, scale = shape.heads // shape.kv_heads, shape.head_dim**-0.5

    def watch(layer: int, q: torch.Tensor, _: torch.Tensor) -> None:
        keys, _ = cache.read(layer, before)
        asked = (q * scale).unflatten(1, (shape.kv_heads, group))
        weight = torch.einsum("mhgd,nhd->mhgn", asked, keys).softmax(dim=-1)
        found.append(weight.mean(dim=(1, 2)))

    engine.run_rows(model, ids[tail], tail, cache, watch=watch)
    return torch.stack(found)


def columns(weight: torch.Tensor) -> list[list[float]]:
    """Return a heat map: the mean of the last layers, question tokens by ``BINS`` columns of context."""
    mean = weight[weight.shape[0] // 2 :].mean(0)
    at = torch.arange(mean.shape[1]) * BINS // mean.shape[1]
    columns = torch.zeros(mean.shape[0], BINS).index_add(1, at, mean)
    return [[round(float(x), 4) for x in row] for row in columns]
