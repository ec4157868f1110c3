"""Two ranks with chunks on disks of their own stay in step when one of them cannot read a file."""

from pathlib import Path
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402
from comparators.weights import from_transformers  # noqa: E402
from test_encoder_and_packing import batch_of  # noqa: E402
from test_no_host_waits import served  # noqa: E402
from test_ranks import RANKS, split  # noqa: E402

from canopy_chunks.server import forward as forwards  # noqa: E402
from canopy_chunks.server import model_view  # noqa: E402
from canopy_chunks.store import disk  # noqa: E402
from canopy_chunks.store.agreed_reads import AgreedReads  # noqa: E402
from canopy_chunks.store.read_ahead import ReadAhead  # noqa: E402
from canopy_chunks.store.store import ChunkStore  # noqa: E402
from canopy_chunks.text.documents import document_name  # noqa: E402
from sglang_canopy.errors import CanopyError  # noqa: E402
from support.chunk_engine import LENGTH, SYSTEM, learn, prompt, request, tiers  # noqa: E402
from support.chunk_models import build  # noqa: E402
from support.gloo_ranks import on_ranks  # noqa: E402
from support.queued import queued  # noqa: E402


class Group:
    """The part of SGLang's group coordinator that chunk reuse calls."""

    def __init__(self, rank: int) -> None:
        self.rank_in_group, self.world_size, self.cpu_group = rank, RANKS, dist.group.WORLD

    def all_gather_object(self, mine):
        every = [None] * RANKS
        dist.all_gather_object(every, mine)
        return every


def ids_of() -> torch.Tensor:
    return torch.randint(0, 300, (230,), generator=torch.Generator().manual_seed(1))


def engine_of(model, patch, folder: Path):
    engine = served(model, patch, lambda x: x, disk_mb=64, directory=str(folder))
    engine.library.store._tiers[0].capacity_bytes = 0  # nothing fits in memory
    return engine


def damage(engine, req, which: int) -> None:
    path = engine.library.store.look(engine.new_request(req).keys[which][0]).path
    whole = bytearray(path.read_bytes())
    whole[-5] ^= 1
    path.write_bytes(whole)


def rows_of(engine, out, bounds):
    """Return the rows that one step of the prompt computes, and the chunks' places after it."""
    req = request(out, bounds, rid="r", full_untruncated_fill_ids=out)
    queued(engine, req)
    batch = batch_of([(0, len(out))])
    batch.reqs = [req]
    table = torch.randperm(400, generator=torch.Generator().manual_seed(3))[None, : len(out)]
    engine.runner.req_to_token_pool = SimpleNamespace(req_to_token=table)
    (rows,), planned = forwards._choose_rows(engine, batch)
    where = tiers(engine, request(out, bounds))
    return rows.tolist(), planned, where, engine.counts["fallbacks"]


def scenario(rank: int, folder: Path):
    found, patch = {}, pytest.MonkeyPatch()
    patch.setattr(model_view, "_group", lambda: Group(rank))
    model, ids = split(from_transformers(build("llama")), rank), ids_of()
    engine = engine_of(model, patch, folder)
    first = request(*prompt(ids))
    learn(engine, first)
    turned = prompt(ids, (2, 0, 1))
    found["whole"] = rows_of(engine, *turned)
    if rank == 1:
        damage(engine, first, 1)
    found["damaged on one"] = rows_of(engine, *turned)
    learn(engine, first)
    found["encoded again"] = rows_of(engine, *turned)
    if rank == 0:
        engine.library.store.look(engine.new_request(first).keys[0][0]).path.unlink()
    again = engine_of(model, patch, folder)
    found["gone on one, at start"] = rows_of(again, *turned)
    # A rank's own files only: the other rank may be ahead, and have deleted one already.
    found["files"] = len(list(again.library.store.folder.path.glob("*.chunk")))
    again.library.command(
        "delete", document_name(ids[SYSTEM + LENGTH :][:LENGTH].tolist(), None), None
    )
    if rank == 1:
        patch.setattr(disk, "write", lambda path, chunk: (_ for _ in ()).throw(OSError("full")))
    learn(again, first)
    found["not written on one"] = rows_of(again, *turned)
    patch.undo()
    return found


def test_ranks_compute_the_same_tokens_if_one_cannot_read_a_chunk(tmp_path) -> None:
    found = on_ranks(RANKS, scenario, tmp_path, tmp_path / "disk")
    assert found[0] == found[1]
    assert found[0].pop("files") == 2  # a chunk that one rank lost is deleted by both
    for rows, planned, _, fallbacks in found[0].values():
        assert planned == [0]
        assert fallbacks == 0
        assert len(rows) < SYSTEM + 3 * LENGTH
    where = {name: tiers for name, (_, _, tiers, _) in found[0].items()}
    every, turned = ["disk"] * 3, (2, 0, 1)
    assert where["whole"] == where["encoded again"] == every
    assert where["damaged on one"] == [None if i == 1 else "disk" for i in turned]
    assert where["gone on one, at start"] == [None if i == 0 else "disk" for i in turned]
    assert where["not written on one"].count(None) >= 1


def test_ranks_agree_on_another_variant_of_a_missing_chunk(llama, tmp_path) -> None:
    from canopy_chunks.fuse.encode import encode

    store, ids = ChunkStore("model", {"disk": 1 << 24}, tmp_path), ids_of().tolist()
    variants = [store.put(encode(llama, ids[:40], ids[40:48])), store.put(encode(llama, ids[:40]))]
    asked = []

    def true_on_all(mine):
        asked.append(mine)
        return [len(asked) > 1] * len(mine)  # the other rank cannot read the first chunk

    agreed = AgreedReads(ReadAhead(0), true_on_all)
    agreed.read(store, lambda: [k for k in variants if store.where(k)][:1])
    assert asked == [[True], [True]]
    assert store.where(variants[0]) is agreed.take(variants[0]) is None
    assert agreed.take(variants[1]).ids == tuple(ids[:40])


def test_a_chunk_that_could_not_be_written_is_missed_when_it_is_read(llama, tmp_path, monkeypatch):
    from canopy_chunks.fuse.encode import encode

    store = ChunkStore("model", {"disk": 1 << 24}, tmp_path, keep=list)
    real = disk.write

    def full(path, chunk):
        real(path, chunk)
        raise OSError("no space left")

    monkeypatch.setattr(disk, "write", full)
    key = store.put(encode(llama, ids_of()[:40].tolist()))
    store.check()
    assert store.where(key) == "disk"
    with pytest.raises(CanopyError, match="damaged"):
        store.look(key).load()
    assert store.delete(key)
    assert not list(tmp_path.rglob("*.chunk"))
