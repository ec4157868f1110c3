"""Prompts of two documents, and their chunks."""

import torch

from canopy_documents.fuse.encode import Encoder
from canopy_documents.store.chunk import Chunk, FusedPrompt, PlacedChunk


def encode(model, ids, prefix=()):
    """The chunk of ``ids``, encoded behind ``prefix``."""
    return Encoder(model, prefix).encode(ids)


def flat_chunk(n=16):
    return Chunk(tuple(range(n)), *(torch.ones(1, n, 1, 2) for _ in "kv"))


def prompt_of_two(model, ids, with_prefix=True):
    prefix = ids[:20].tolist() if with_prefix else ()
    return FusedPrompt(
        ids,
        tuple(PlacedChunk(encode(model, ids[a : a + 60].tolist(), prefix), a) for a in (20, 80)),
    )
