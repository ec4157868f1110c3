"""Making a chunk: a plain prefill, its keys taken back before RoPE.

Alone (the paper), each chunk's first tokens become attention sinks it will not be in the prompt.
Behind the real system prefix, whose KV is then dropped, they do not: half the error, no cost later.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from sglang_canopy.chunk.cache import Cache, dense_cache
from sglang_canopy.chunk.chunk import Chunk
from sglang_canopy.chunk.engine import prefill
from sglang_canopy.chunk.model import Model
from sglang_canopy.chunk.rope import undo_checked


def encode(model: Model, ids: Sequence[int], prefix: Sequence[int] = ()) -> Chunk:
    """Prefill ``prefix + ids`` and keep the KV of ``ids``."""
    tokens = torch.tensor([*prefix, *ids], dtype=torch.long, device=model.device)
    cache = dense_cache(model, tokens.numel())
    if len(ids):
        prefill(model, tokens, cache)
    return capture(model, cache, ids, len(prefix), prefix)


def capture(
    model: Model, cache: Cache, ids: Sequence[int], start: int, prefix: Sequence[int] = ()
) -> Chunk:
    """Take the KV of ``ids`` at ``start`` out of a cache that a plain prefill filled.

    Keys are un-rotated in fp32 and checked by rotating them again, then kept in the model's dtype.
    """
    positions = torch.arange(start, start + len(ids), device=model.device)
    keys, values = [], []
    for layer in range(model.shape.layers):
        k, v = cache.read(layer, positions)
        keys.append(undo_checked(k, model.rope, positions).to(model.dtype))
        values.append(v.clone())
    return Chunk(tuple(ids), torch.stack(keys), torch.stack(values), tuple(prefix))
