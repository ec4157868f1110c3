"""Encode a chunk: a plain prefill, whose keys are then un-rotated.

Without a prefix, each chunk's first tokens become attention sinks, which they are not in the
prompt. Behind BOS (CacheBlend's script) or the real system prefix, whose KV is then dropped, they
do not. Behind the prefix and a stand-in document, the chunk is not encoded as a first document
either, as most chunks are not first: less error again (docs/research/chunks.md). None of these adds
to a request's cost.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from canopy_chunks.fuse.cache import KVCache, dense_cache
from canopy_chunks.fuse.model import Model
from canopy_chunks.fuse.rope import undo_checked
from canopy_chunks.fuse.rows import prefill
from canopy_chunks.store.chunk import Chunk

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
"""Two documents about nothing that stand in for a chunk's predecessors: about 130 tokens."""


def stand_in(ids: Callable[[str], Sequence[int]]) -> tuple[int, ...]:
    """Return the tokens of the stand-in documents, each with its closing empty line.

    ``ids`` tokenizes a text without special tokens.
    """
    gap = tuple(ids("\n\n"))
    return tuple(token for text in STAND_IN for token in (*ids(text), *gap))


class Encoder:
    """Encodes chunks behind one ``prefix``, which is prefilled once."""

    def __init__(self, model: Model, prefix: Sequence[int] = ()) -> None:
        self.model, self.prefix = model, tuple(prefix)
        self._behind = dense_cache(model, len(self.prefix))
        if self.prefix:
            prefill(model, self._tensor(self.prefix), self._behind)

    def encode(self, ids: Sequence[int]) -> Chunk:
        """Prefill ``ids`` behind the prefix and return their KV."""
        start = len(self.prefix)
        cache = dense_cache(self.model, start + len(ids))
        for pool, first in ((cache.k, self._behind.k), (cache.v, self._behind.v)):
            for layer, rows in zip(pool, first):
                layer[:start] = rows
        if len(ids):
            prefill(self.model, self._tensor(ids), cache, start)
        return capture(self.model, cache, ids, start, self.prefix)

    def _tensor(self, ids: Sequence[int]) -> torch.Tensor:
        return torch.tensor(ids, dtype=torch.long, device=self.model.device)


def encode(model: Model, ids: Sequence[int], prefix: Sequence[int] = ()) -> Chunk:
    """Prefill ``prefix + ids`` and return the KV of ``ids``. For many chunks use an
    :class:`Encoder`."""
    return Encoder(model, prefix).encode(ids)


def capture(
    model: Model, cache: KVCache, ids: Sequence[int], start: int, prefix: Sequence[int] = ()
) -> Chunk:
    """Copy the KV of ``ids`` at ``start`` from a cache that a plain prefill filled.

    Keys are un-rotated in fp32 and checked by rotating them again, then stored in the model's
    dtype.
    """
    positions = torch.arange(start, start + len(ids), device=model.device)
    keys, values = [], []
    for layer in range(model.shape.layers):
        k, v = cache.read(layer, positions)
        keys.append(undo_checked(k, model.rope, positions).to(model.dtype))
        values.append(v.clone())
    return Chunk(tuple(ids), torch.stack(keys), torch.stack(values), tuple(prefix))
