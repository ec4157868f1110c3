"""Weight updates of a running server discard all chunks; the memory and disk bounds still hold."""

import dataclasses
import shutil
from types import SimpleNamespace

import pytest
import torch

from canopy_documents.server import engine as engines
from canopy_documents.server import model_view
from canopy_documents.server.scheduler import flushed
from sglang_canopy.storage.weights import Weights
from support.document_engine import learn, prompt, request, scheduler_of, tiers


@pytest.fixture
def served(make, ids, tmp_path):
    """Return an engine with a disk store and a request whose documents are stored there."""
    engine = make(disk_mb=64, directory=str(tmp_path / "chunks"))
    engine.library.store.capacity_bytes = 0  # nothing fits in memory
    req = request(*prompt(ids))
    learn(engine, req)
    engine.library.store.disk.finish()
    assert tiers(engine, req) == ["disk"] * 3
    return engine, req


@pytest.fixture
def change(llama, monkeypatch):
    def changed(engine, name: str) -> None:
        other = dataclasses.replace(llama, identity=name * 16)
        monkeypatch.setattr(engines.model_view, "served_model", lambda *_: other)
        flushed(True, scheduler_of(engine))

    return changed


def test_files_of_earlier_weights_are_deleted(served, change, tmp_path) -> None:
    """A server whose weights change at every step would fill the disk."""
    engine, req = served
    held: list[int] = []
    for name in "abcdef":
        change(engine, name)
        assert tiers(engine, req) == [None] * 3
        learn(engine, req)
        engine.library.store.disk.finish()
        held.append(sum(path.stat().st_blocks for path in tmp_path.rglob("*")))
    assert held[-1] < 1.5 * held[0]


def test_a_directory_that_is_lost_ends_no_server(served, change, tmp_path) -> None:
    engine, req = served
    shutil.rmtree(tmp_path / "chunks")
    (tmp_path / "chunks").write_text("")
    change(engine, "a")
    learn(engine, req)
    assert tiers(engine, req) == ["host"] * 3


class Inner(torch.nn.Module):
    """Two tensors with more elements than a sample reads."""

    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens = torch.nn.Embedding(4000, 64)


CONFIG = SimpleNamespace(to_json_string=lambda: "{}")


@pytest.fixture
def weights(monkeypatch):
    """Reset the process's record of weight updates."""
    new_weights = Weights()
    monkeypatch.setattr(model_view, "WEIGHTS", new_weights)
    monkeypatch.setattr(engines, "WEIGHTS", new_weights)
    return new_weights


def test_every_weight_update_gets_a_new_identity(weights) -> None:
    """A fine-tune of added tokens changes only a few embedding rows."""
    inner, seen = Inner(), set()
    for _ in range(3):
        seen.add(model_view.identity(inner, CONFIG, weights.id))
        weights.changed()
    assert len(seen) == 3


def test_files_that_differ_in_some_rows_are_other_weights(tmp_path) -> None:
    files = []
    for name, row in (("a", 0), ("b", 0), ("c", 1)):
        (tmp_path / name).mkdir()
        rows = bytearray(1 << 20)
        rows[777_777] = row
        (tmp_path / name / "model.safetensors").write_bytes(rows)
        config = SimpleNamespace(model_path=str(tmp_path / name))
        files.append(model_view.weight_files(SimpleNamespace(model_config=config)))
    assert files[0] == files[1] != files[2]
    gone = SimpleNamespace(model_config=SimpleNamespace(model_path="no/such-model"))
    assert model_view.weight_files(gone) == ""


@pytest.mark.parametrize("flush", [True, False])
def test_documents_of_before_an_update_are_not_reused(
    make, llama, ids, monkeypatch, weights, flush
) -> None:
    engine, inner = make(), Inner()

    def served_model(_runner, _files=""):
        name = model_view.identity(inner, CONFIG, weights.id)
        return dataclasses.replace(llama, identity=name)

    monkeypatch.setattr(engines.model_view, "served_model", served_model)
    engine.weights_changed()
    req = request(*prompt(ids))
    learn(engine, req)
    engine.library.encoder.enqueue(list(range(40)), (), "")  # queued at the time of the update
    engine.work_when_idle()
    assert tiers(engine, req) == ["host"] * 3
    weights.changed()
    if flush:
        flushed(True, scheduler_of(engine))
    assert tiers(engine, req) == [None] * 3
    assert not engine.library.encoder.busy
