"""An engine of document reuse without a server."""

import pytest

from canopy_documents.server import engine as engines
from canopy_documents.server.engine import DocumentEngine
from canopy_documents.server.options import ReuseOptions
from support.document_engine import DOCUMENT_TOKENS, SYSTEM_TOKENS, Tokenizer, bare_runner
from support.fused_prompts import encode


@pytest.fixture
def make_engine(llama, monkeypatch):
    """``make_engine(ratio=..., ...)``: an engine over the small model, without a server around it."""
    monkeypatch.setattr(engines.model_view, "served_model", lambda *_: llama)
    runner = bare_runner()

    def build(stand_ins=True, **options) -> DocumentEngine:
        tokenizer = Tokenizer() if stand_ins else None
        return DocumentEngine(runner, ReuseOptions(memory_mb=64, **options), tokenizer)

    return build


@pytest.fixture
def chunks(llama, ids):
    document_starts = range(SYSTEM_TOKENS, SYSTEM_TOKENS + 3 * DOCUMENT_TOKENS, DOCUMENT_TOKENS)
    system = ids[:SYSTEM_TOKENS].tolist()
    return [encode(llama, ids[a : a + DOCUMENT_TOKENS].tolist(), system) for a in document_starts]
