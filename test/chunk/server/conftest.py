"""An engine of document reuse without a server."""

import pytest

from canopy_chunks.fuse.encode import encode
from canopy_chunks.server import engine as engines
from canopy_chunks.server.engine import ChunkEngine
from canopy_chunks.server.options import Options
from support.chunk_engine import LENGTH, SYSTEM, Tokenizer, bare_runner


@pytest.fixture
def make(llama, monkeypatch):
    """``make(encode=..., ...)``: an engine over the small model, without a server around it."""
    monkeypatch.setattr(engines.model_view, "served_model", lambda *_: llama)
    runner = bare_runner()

    def made(**options) -> ChunkEngine:
        return ChunkEngine(runner, Options(memory_mb=64, **options), Tokenizer())

    return made


@pytest.fixture
def chunks(llama, ids):
    starts = range(SYSTEM, SYSTEM + 3 * LENGTH, LENGTH)
    return [encode(llama, ids[a : a + LENGTH].tolist(), ids[:SYSTEM].tolist()) for a in starts]
