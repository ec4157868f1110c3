"""Prompts of two documents, and a check that a selector keeps to its budget."""

import torch

from canopy_chunks.fuse import cache as caches
from canopy_chunks.fuse.encode import encode
from canopy_chunks.fuse.fusion import fused_prefill
from canopy_chunks.store.chunk import Chunk, FusedPrompt, Placed


def flat_chunk(n=16, layers=1):
    k = torch.ones(layers, n, 1, 2)
    return Chunk(tuple(range(n)), k, torch.ones(layers, n, 1, 2))


def prompt(model, ids, behind=True):
    prefix = ids[:20].tolist() if behind else ()
    return FusedPrompt(
        ids, tuple(Placed(encode(model, ids[a : a + 60].tolist(), prefix), a) for a in (20, 80))
    )


def check_budget(llama, ids, selector, ratio):
    """A selector chooses no more than its share, and of the chunks alone."""
    p = prompt(llama, ids)
    cache = caches.dense_cache(llama, len(p))
    fused = fused_prefill(llama, p, cache, selector, ratio)
    inside = p.in_chunk()[fused.rows]
    assert inside.sum() <= int(ratio * p.reusable)
    assert (~inside).sum() == len(p) - p.reusable
    assert torch.equal(fused.rows, fused.rows.sort()[0])
