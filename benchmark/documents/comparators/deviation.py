"""CacheBlend: tokens whose V deviates most from the reused one, chosen while computing.

All rows run layer 0 (its K and V know no context); at layer 1 the deviation is known, and a set
somewhat larger than the budget goes on; at layer 2 it is cut to the budget (gradual filtering).
Its layer 0 is paid in full: that is in the timing, not in the ratio. Tokens outside chunks are
never dropped.
"""

from __future__ import annotations

import torch

from canopy_documents.fuse.selectors.base import Context, SelectedTokens, Selector, top
from canopy_documents.store.device_copy import to_device

WIDER = 1.5
"""Rows kept at layer 1, times the budget."""


class Deviation(Selector):
    """High-KV-deviation tokens, with gradual filtering over layers 1 and 2."""

    name = "hkvd"
    reads_cache = True

    def choose(self, context: Context) -> SelectedTokens:
        inside = context.prompt.in_chunk()
        inside[len(inside) - 1] = False
        cache, budget = context.cache, context.budget
        chunk_row = to_device(inside, context.model.device)
        others = int((~inside).sum()) - context.ready  # rows that are always kept

        def narrow(layer, positions, k, v):  # type: ignore[no-untyped-def]
            if layer not in (1, 2):
                return None
            _, old = cache.read(layer, positions)
            off = (v.float() - old.float()).flatten(1).pow(2).sum(dim=1)
            off.masked_fill_(~chunk_row[positions], float("inf"))
            return top(off, others + (int(WIDER * budget) if layer == 1 else budget))

        return SelectedTokens(inside.nonzero()[:, 0], narrow)


class Oracle(Selector):
    """True deviation of K and V from a full prefill, mean over layers: an oracle for comparison."""

    name = "oracle"
    reads_cache = True

    def choose(self, context: Context) -> SelectedTokens:
        from canopy_documents.fuse.cache import dense_cache
        from canopy_documents.fuse.rows import prefill
        from comparators.prophetkv import over_chunks

        model, prompt = context.model, context.prompt
        exact = dense_cache(model, len(prompt))
        prefill(model, prompt.ids, exact)
        every = torch.arange(len(prompt), device=model.device)
        score = torch.zeros(len(prompt))
        for layer in range(model.shape.layers):
            for old, new in zip(context.cache.read(layer, every), exact.read(layer, every)):
                off = (old.float() - new.float()).flatten(1).norm(dim=1)
                score += (off / new.float().flatten(1).norm(dim=1).mean()).cpu()
        return SelectedTokens(over_chunks(prompt, score, context.budget))
