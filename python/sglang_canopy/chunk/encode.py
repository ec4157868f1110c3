"""Making a chunk: a plain prefill, its keys taken back before RoPE.

Alone (the paper), each chunk's first tokens become attention sinks it will not be in the prompt.
Behind the real system prefix, whose KV is then dropped, they do not. Behind the prefix and a
stand-in document the chunk no longer takes itself for the first document either, which most are
not: less error again (docs/chunks.md). Neither costs a request anything.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from sglang_canopy.chunk.cache import Cache, dense_cache
from sglang_canopy.chunk.chunk import Chunk
from sglang_canopy.chunk.engine import prefill
from sglang_canopy.chunk.model import Model
from sglang_canopy.chunk.rope import undo_checked

STAND_IN = (
    "The committee met on Tuesday to discuss the annual report. Several members noted that the "
    "weather had been mild, and that the harvest was larger than in the years before. The meeting "
    "was closed after two hours, and the minutes were sent to all who had asked for them. A second "
    "meeting will be held in the autumn.",
    "The old road follows the river for eleven miles, past two mills and a small chapel of grey "
    "stone. It was widened in the last century, when carts gave way to lorries, and again after "
    "the flood. Few travellers use it today, because the new bridge is shorter, but it is kept "
    "open for the farms along the valley and for those who like to walk.",
)
"""Two documents about nothing, to stand where a chunk's predecessors will: about 130 tokens."""


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
