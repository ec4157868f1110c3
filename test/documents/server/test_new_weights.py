"""Weight updates of a running server discard all chunks; the memory and disk bounds still hold."""

import dataclasses
import shutil
from types import SimpleNamespace

import pytest
import torch

from canopy_documents.server import engine as engines
from canopy_documents.server import model_view
from canopy_documents.server.scheduler import replace_stale_store
from sglang_canopy.storage.weights import Weights
from support.document_engine import chunk_tiers, learn, prompt, request, scheduler_of


@pytest.fixture
def engine_and_req(make_engine, ids, tmp_path):
    """Return an engine with a disk store and a request whose documents are stored there."""
    engine = make_engine(disk_mb=64, directory=str(tmp_path / "chunks"))
    engine.library.store.capacity_bytes = 0  # nothing fits in memory
    req = request(*prompt(ids))
    learn(engine, req)
    engine.library.store.disk.finish()
    assert chunk_tiers(engine, req) == ["disk"] * 3
    return engine, req


@pytest.fixture
def change_weights(llama, monkeypatch):
    def change(engine, identity: str) -> None:
        new_model = dataclasses.replace(llama, identity=identity * 16)
        monkeypatch.setattr(engines.model_view, "served_model", lambda *_: new_model)
        replace_stale_store(True, scheduler_of(engine))

    return change


def test_files_of_earlier_weights_are_deleted(engine_and_req, change_weights, tmp_path) -> None:
    """A server whose weights change at every step would fill the disk."""
    engine, req = engine_and_req
    block_counts: list[int] = []
    for identity in "abcdef":
        change_weights(engine, identity)
        assert chunk_tiers(engine, req) == [None] * 3
        learn(engine, req)
        engine.library.store.disk.finish()
        block_counts.append(sum(path.stat().st_blocks for path in tmp_path.rglob("*")))
    assert block_counts[-1] < 1.5 * block_counts[0]


def test_a_server_continues_without_its_directory(engine_and_req, change_weights, tmp_path) -> None:
    engine, req = engine_and_req
    shutil.rmtree(tmp_path / "chunks")
    (tmp_path / "chunks").write_text("")
    change_weights(engine, "a")
    learn(engine, req)
    assert chunk_tiers(engine, req) == ["host"] * 3


class EmbeddingModel(torch.nn.Module):
    """Two tensors with more elements than a sample reads."""

    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens = torch.nn.Embedding(4000, 64)


MODEL_CONFIG = SimpleNamespace(to_json_string=lambda: "{}")


@pytest.fixture
def weights(monkeypatch):
    """Reset the process's record of weight updates."""
    new_weights = Weights()
    monkeypatch.setattr(model_view, "WEIGHTS", new_weights)
    monkeypatch.setattr(engines, "WEIGHTS", new_weights)
    return new_weights


def test_every_weight_update_gets_a_new_identity(weights) -> None:
    """A fine-tune of added tokens changes only a few embedding rows."""
    causal_lm, identities = EmbeddingModel(), set()
    for _ in range(3):
        identities.add(model_view.weights_digest(causal_lm, MODEL_CONFIG, weights.id))
        weights.record_load()
    assert len(identities) == 3


def test_files_that_differ_in_some_rows_are_other_weights(tmp_path) -> None:
    digests = []
    for name, changed_byte in (("a", 0), ("b", 0), ("c", 1)):
        (tmp_path / name).mkdir()
        content = bytearray(1 << 20)
        content[777_777] = changed_byte
        (tmp_path / name / "model.safetensors").write_bytes(content)
        config = SimpleNamespace(model_path=str(tmp_path / name))
        digests.append(model_view.weight_files(SimpleNamespace(model_config=config)))
    assert digests[0] == digests[1] != digests[2]
    missing = SimpleNamespace(model_config=SimpleNamespace(model_path="no/such-model"))
    assert model_view.weight_files(missing) == ""


@pytest.mark.parametrize("is_cache_flushed", [True, False])
def test_documents_from_before_an_update_are_not_reused(
    make_engine, llama, ids, monkeypatch, weights, is_cache_flushed
) -> None:
    engine, causal_lm = make_engine(), EmbeddingModel()

    def served_model(_runner, _files=""):
        identity = model_view.weights_digest(causal_lm, MODEL_CONFIG, weights.id)
        return dataclasses.replace(llama, identity=identity)

    monkeypatch.setattr(engines.model_view, "served_model", served_model)
    engine.replace_if_weights_changed()
    req = request(*prompt(ids))
    learn(engine, req)
    engine.library.encoder.enqueue(list(range(40)), (), "")  # queued at the time of the update
    engine.work_when_idle()
    assert chunk_tiers(engine, req) == ["host"] * 3
    weights.record_load()
    if is_cache_flushed:
        replace_stale_store(True, scheduler_of(engine))
    assert chunk_tiers(engine, req) == [None] * 3
    assert not engine.library.encoder.busy
