"""The forward pass of sparse rows at their true positions, over whatever KV the cache holds.

Every other token's KV is taken from the cache as it is. With all rows it is a plain prefill.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any, TypeVar

import torch
import torch.nn.functional as F

from canopy_chunks.cache import KVCache
from canopy_chunks.model import Layer, Model
from canopy_chunks.rope import rotate

Result = TypeVar("Result")

Narrow = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], "torch.Tensor | None"]
"""``(layer, positions [m], k [m, kv_heads, d] rotated, v)`` -> indices of the rows to keep from this
layer on (sorted), or None for all. Called before K and V are written: a row that is dropped leaves
the cache's own KV in place here and in every deeper layer."""

Replaced = Callable[[int, torch.Tensor], "torch.Tensor | None"]
"""``(layer, positions [m])`` -> indices of the rows whose K and V of this layer replace what the
cache holds there, or None for all. The other rows run on all the same."""

Watch = Callable[[int, torch.Tensor, torch.Tensor], "torch.Tensor | None"]
"""``(layer, q [m, heads, d] rotated, positions [m])``, after this layer's K and V are written. May
return the rows' attention ``[m, heads, d]`` if it has worked that out itself; None if not."""

Correct = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], None]
"""``(layer, k pool, v pool, k [m, kv_heads, d] rotated, v)``, before the rows' own K and V are
written: may change the reused KV of the layer."""


def finish(steps: Generator[None, None, Result]) -> Result:
    """What ``steps`` return, with nothing between them."""
    while True:
        try:
            next(steps)
        except StopIteration as done:
            return done.value  # type: ignore[no-any-return]


def run_rows(*args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """:func:`rows_by_layer` to its end."""
    return finish(rows_by_layer(*args, **kwargs))


@torch.no_grad()
def rows_by_layer(
    model: Model,
    ids: torch.Tensor,
    positions: torch.Tensor,
    cache: KVCache,
    narrow: Narrow | None = None,
    watch: Watch | None = None,
    layers: int | None = None,
    stop: int | None = None,
    arrive: Callable[[int], None] | None = None,
    replaced: Replaced | None = None,
    correct: Correct | None = None,
) -> Generator[None, None, tuple[torch.Tensor, torch.Tensor]]:
    """Run rows ``ids [m]`` at sorted ``positions [m]`` through ``layers`` (default all) layers.

    Writes their K and V into ``cache`` (at each layer, those of the rows that ``replaced`` names);
    returns the rows' last hidden state ``[m', hidden]`` and their positions ``[m']`` (fewer than m
    when ``narrow`` dropped some). With ``stop`` it ends as
    soon as that layer has been watched: what follows in it would not be looked at. Yields before
    each layer.
    """
    shape = model.shape
    scale = shape.head_dim**-0.5
    embed = model.ranks.embed if model.ranks is not None else None
    hidden = F.embedding(ids, model.embed) if embed is None else embed(ids)
    table = model.rope.table(positions)
    for i, layer in enumerate(model.layers[:layers]):
        yield
        if arrive is not None:  # the reused KV of this layer is in place when this returns
            arrive(i)
        q, k, v = _project(model, layer, hidden, table)
        if narrow is not None:
            keep = narrow(i, positions, k, v)
            if keep is not None:
                hidden, positions, table = hidden[keep], positions[keep], table[keep]
                q, k, v = q[keep], k[keep], v[keep]
        if correct is not None:
            correct(i, cache.k[i], cache.v[i], k, v)
        kept = replaced(i, positions) if replaced is not None else None
        if kept is None:
            cache.write(i, positions, k, v)
        else:
            cache.write(i, positions[kept], k[kept], v[kept])
        attended = watch(i, q, positions) if watch is not None else None
        if i == stop:
            break
        if attended is None:
            attended = cache.attend(i, q, positions, scale)
        hidden = hidden + model.whole(F.linear(attended.flatten(1), layer.out))
        gate, up = F.linear(_norm(hidden, layer.norm_mid, shape.eps), layer.gate_up).chunk(2, -1)
        hidden = hidden + model.whole(F.linear(F.silu(gate) * up, layer.down))
    return hidden, positions


@torch.no_grad()
def logits(model: Model, hidden: torch.Tensor) -> torch.Tensor:
    """``[m, hidden]`` last hidden states -> ``[m, vocab]`` fp32."""
    out = F.linear(_norm(hidden, model.norm, model.shape.eps), model.head)
    return (out if model.ranks is None else model.ranks.gather(out)).float()


def prefill(model: Model, ids: torch.Tensor, cache: KVCache, start: int = 0) -> torch.Tensor:
    """Plain prefill of ``ids [m]`` from position ``start``. Returns the last hidden states."""
    model.check_length(start + ids.numel())
    positions = torch.arange(start, start + ids.numel(), device=ids.device)
    return run_rows(model, ids, positions, cache)[0]


def _project(
    model: Model, layer: Layer, hidden: torch.Tensor, table: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Q, K (both rotated) and V of the rows."""
    s = model.shape
    joined = F.linear(_norm(hidden, layer.norm_in, s.eps), layer.qkv, layer.qkv_bias)
    joined = joined.view(-1, s.heads + 2 * s.kv_heads, s.head_dim)
    q, k, v = joined.split([s.heads, s.kv_heads, s.kv_heads], dim=1)
    if layer.head_norms is not None:
        q, k = (_norm(x, weight, s.eps) for x, weight in zip((q, k), layer.head_norms))
        return rotate(q, table), rotate(k, table), v
    turned = rotate(joined[:, : s.heads + s.kv_heads], table)
    return turned[:, : s.heads], turned[:, s.heads :], v


def _norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """RMS norm in fp32, as transformers does it."""
    wide = x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return weight * wide.to(x.dtype)
