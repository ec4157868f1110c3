"""Prompts of two documents, and their chunks."""

import torch

from canopy_documents.fuse.encode import Encoder
from canopy_documents.store.chunk import Chunk, FusedPrompt, PlacedChunk


def encode(model, ids, prefix=()):
    """Return the chunk of ``ids``, encoded behind ``prefix``."""
    return Encoder(model, prefix).encode(ids)


def chunk_of_ones(token_count=16):
    """Return a chunk of one layer whose keys and values are all 1."""
    return Chunk(tuple(range(token_count)), *(torch.ones(1, token_count, 1, 2) for _ in "kv"))


def two_document_prompt(model, ids, with_prefix=True):
    """Return a prompt with chunks of its tokens 20 to 80 and 80 to 140, encoded behind the first 20 or alone."""
    prefix = ids[:20].tolist() if with_prefix else ()
    chunks = {start: encode(model, ids[start : start + 60].tolist(), prefix) for start in (20, 80)}
    return FusedPrompt(ids, tuple(PlacedChunk(chunk, start) for start, chunk in chunks.items()))
