"""Weight updates of a running server discard all chunks; the memory and disk bounds still hold."""

import dataclasses
import functools
import shutil
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

from canopy_chunks.quality.expected_kl import ExpectedKL  # noqa: E402
from canopy_chunks.server import engine as engines  # noqa: E402
from canopy_chunks.server import model_view, scheduler  # noqa: E402
from canopy_chunks.server.scheduler import flushed  # noqa: E402
from sglang_canopy.storage.weights import Weights  # noqa: E402
from support.chunk_engine import learn, prompt, request, tiers  # noqa: E402


@pytest.fixture
def served(make, ids, tmp_path):
    """Return an engine with a disk store and a request whose documents are stored there."""
    engine = make(disk_mb=64, directory=str(tmp_path / "chunks"))
    engine.library.store._tiers[0].capacity_bytes = 0  # nothing fits in memory
    req = request(*prompt(ids))
    learn(engine, req)
    assert tiers(engine, req) == ["disk"] * 3
    return engine, req


@pytest.fixture
def change(llama, monkeypatch):
    def changed(engine, name: str) -> None:
        other = dataclasses.replace(llama, identity=name * 16)
        monkeypatch.setattr(engines.model_view, "served_model", lambda *_: other)
        flushed(engine, True)

    return changed


def test_files_of_earlier_weights_are_deleted(served, change, tmp_path) -> None:
    """A server whose weights change at every step would fill the disk."""
    engine, req = served
    for name in "abc":
        change(engine, name)
        assert tiers(engine, req) == [None] * 3
        engine.library.store._tiers[0].capacity_bytes = 0
        learn(engine, req)
        assert len(list(tmp_path.rglob("*.chunk"))) == len(engine.library.store)
    assert len([one for one in (tmp_path / "chunks").iterdir() if one.is_dir()]) == 1


def test_new_weights_have_their_own_scale_of_expected_kl(make, change, monkeypatch) -> None:
    monkeypatch.setattr(scheduler, "first_ranks", lambda mine: mine)
    engine, scales = make(max_kl=0.03), {"a" * 16: 3.0}
    monkeypatch.setattr(scheduler, "measure_scale", lambda model, *_: scales[model.identity])
    engine.expected = ExpectedKL(1.0)
    engine.measure_expected = functools.partial(scheduler.expected_kl, engine, None)
    change(engine, "a")
    assert engine.expected == ExpectedKL(3.0)
    change(engine, "b")  # cannot be measured: the bound is kept by full recompute
    assert engine.expected.ratio_for(2, 0.03) == 1.0


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
    made = Weights()
    monkeypatch.setattr(model_view, "WEIGHTS", made)
    monkeypatch.setattr(engines, "WEIGHTS", made)
    return made


def test_every_weight_update_gets_a_new_identity(weights) -> None:
    """A fine-tune of added tokens changes only a few embedding rows."""
    inner, seen = Inner(), set()
    for _ in range(3):
        seen.add(model_view.identity(inner, CONFIG, weights.id))
        weights.changed()
    assert len(seen) == 3


def test_files_that_differ_in_some_rows_are_other_weights(tmp_path) -> None:
    found = []
    for name, row in (("a", 0), ("b", 0), ("c", 1)):
        (tmp_path / name).mkdir()
        rows = bytearray(1 << 20)
        rows[777_777] = row
        (tmp_path / name / "model.safetensors").write_bytes(rows)
        config = SimpleNamespace(model_path=str(tmp_path / name))
        found.append(model_view.weight_files(SimpleNamespace(model_config=config)))
    assert found[0] == found[1] != found[2]
    gone = SimpleNamespace(model_config=SimpleNamespace(model_path="no/such-model"))
    assert model_view.weight_files(gone) == ""


@pytest.mark.parametrize("flush", [True, False])
def test_documents_of_before_an_update_are_not_reused(
    make,
    llama,
    ids,
    monkeypatch,
    weights,
    flush,
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
        flushed(engine, True)
    assert tiers(engine, req) == [None] * 3
    assert not engine.library.encoder.busy
