"""Encode a chunk: a plain prefill, whose keys are then un-rotated.

Without a prefix, each chunk's first tokens become attention sinks, which they are not in the
prompt. A prefix whose KV is dropped afterwards avoids that: BOS (as in CacheBlend's script) or the
real system prefix. A stand-in document after the prefix reduces the error further: the chunk is
then not encoded as a first document, and most chunks are not first (docs/research/documents.md). None
of these adds to a request's cost.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from canopy_documents.fuse.cache import KVCache, dense_cache
from canopy_documents.fuse.model import Model
from canopy_documents.fuse.rope import undo_checked
from canopy_documents.fuse.rows import prefill
from canopy_documents.store.chunk import Chunk

STAND_IN_TEXTS = (
    "The committee met on Tuesday to discuss the annual report. Several members noted that the "
    "weather had been mild, and that the harvest was larger than in the years before. The meeting "
    "was closed after two hours, and the minutes were sent to all who had asked for them. A second "
    "meeting will be held in the autumn.",
    "The old road follows the river for eleven miles, past two mills and a small chapel of grey "
    "stone. It was widened in the last century, when carts gave way to lorries, and again after "
    "the flood. Few travellers use it today, because the new bridge is shorter, but it is kept "
    "open for the farms along the valley and for those who like to walk.",
    "Bees visit the lime trees in early summer, and for two weeks the honey of the district tastes of "
    "them. The keepers move their hives to the edge of the wood before the trees flower. After a wet "
    "June there is little to carry home, and most of it is left for the winter.",
    "The library keeps its newspapers in a cellar, bound by year. Readers fill in a slip and wait "
    "a quarter of an hour. The oldest volumes may be read only in the mornings, on a table near the "
    "desk, and no page may be copied without the consent of the director.",
    "A ferry crosses the bay every forty minutes between March and October. It carries sixteen cars "
    "and about a hundred passengers. In strong wind from the west it stays in the harbour, and a bus "
    "takes travellers around the bay instead.",
    "Bricks of this kind were made from the clay of the lower fields and dried for three weeks before "
    "they were fired. They are a little longer than those of the next valley. Builders preferred them "
    "for chimneys, since they crack less in frost.",
    "The orchestra rehearses on Thursday evenings in the hall of the school. It has no conductor of "
    "its own, and the players choose one for each concert. Last spring they performed two suites and "
    "an overture, and the collection paid for new lamps.",
    "Wool from the hill farms is washed twice and sorted by length. The longest goes to the weavers, "
    "the rest is felted. Prices have hardly changed for ten years, although the number of sheep has "
    "fallen and transport costs more than before.",
    "The observatory was moved to the ridge when the lights of the town became too bright. Its dome "
    "turns on wheels from a disused railway. On clear nights the telescope is open to visitors, who "
    "are asked to bring warm clothes.",
    "Salt was carried over the pass by mules, in bags of equal weight, so that no animal was loaded "
    "on one side more than on the other. Inns along the way kept stables, and some of their cellars "
    "still show the marks of the scales.",
)
"""Documents about nothing that stand in for a chunk's predecessors. The first two have about 130
tokens, all ten about 640."""

FEW_STAND_INS = 2


def stand_in_prefix(
    tokenize: Callable[[str], Sequence[int]], documents: int = FEW_STAND_INS
) -> tuple[int, ...]:
    """Return the tokens of the first ``documents`` stand-ins, each with its closing empty line.

    ``tokenize`` tokenizes a text without special tokens.
    """
    gap = tuple(tokenize("\n\n"))
    return tuple(token for text in STAND_IN_TEXTS[:documents] for token in (*tokenize(text), *gap))


class Encoder:
    """Encodes chunks that follow one ``prefix``, which is prefilled once."""

    def __init__(self, model: Model, prefix: Sequence[int] = ()) -> None:
        self.model, self.prefix = model, tuple(prefix)
        self._prefix_cache = dense_cache(model, len(self.prefix))
        if self.prefix:
            prefill(model, self._tensor(self.prefix), self._prefix_cache)

    def encode(self, ids: Sequence[int]) -> Chunk:
        """Prefill ``ids`` after the prefix and return their KV."""
        start = len(self.prefix)
        cache = dense_cache(self.model, start + len(ids))
        for pool, prefix_pool in ((cache.k, self._prefix_cache.k), (cache.v, self._prefix_cache.v)):
            for layer, prefix_rows in zip(pool, prefix_pool):
                layer[:start] = prefix_rows
        if len(ids):
            prefill(self.model, self._tensor(ids), cache, start)
        return capture(self.model, cache, ids, start, self.prefix)

    def _tensor(self, ids: Sequence[int]) -> torch.Tensor:
        return torch.tensor(ids, dtype=torch.long, device=self.model.device)


def capture(
    model: Model, cache: KVCache, ids: Sequence[int], start: int, prefix: Sequence[int] = ()
) -> Chunk:
    """Copy the KV of ``ids`` at ``start`` from a cache that a plain prefill filled.

    Keys are un-rotated in fp32, checked by rotating them again, and stored in the model's dtype.
    """
    positions = torch.arange(start, start + len(ids), device=model.device)
    keys, values = [], []
    for layer in range(model.shape.layers):
        k, v = cache.read(layer, positions)
        keys.append(undo_checked(k, model.rope, positions).to(model.dtype))
        values.append(v.clone())
    return Chunk(tuple(ids), torch.stack(keys), torch.stack(values), tuple(prefix))
