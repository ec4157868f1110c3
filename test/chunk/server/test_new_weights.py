"""Weights that change while a server runs: chunks begin anew, within the same bounds."""

from __future__ import annotations

import dataclasses
import shutil

import pytest

torch = pytest.importorskip("torch")

from test_engine import learn, make, prompt, request, tiers  # noqa: E402, F401

from canopy_chunks.server import engine as engines  # noqa: E402
from canopy_chunks.server.scheduler import flushed  # noqa: E402


@pytest.fixture
def served(make, ids, tmp_path):  # noqa: F811
    """An engine that keeps documents on disk, and a request whose documents are there."""
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
        monkeypatch.setattr(engines.model_view, "served_model", lambda runner: other)
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


def test_a_directory_that_is_lost_ends_no_server(served, change, tmp_path) -> None:
    engine, req = served
    shutil.rmtree(tmp_path / "chunks")
    (tmp_path / "chunks").write_text("")
    change(engine, "a")
    learn(engine, req)
    assert tiers(engine, req) == ["host"] * 3
