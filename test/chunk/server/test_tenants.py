"""Documents of tenants in an engine: apart, and deleted completely."""

import pytest

torch = pytest.importorskip("torch")

from canopy_chunks.server.scheduler import delete_documents  # noqa: E402
from support.chunk_engine import LENGTH, SYSTEM, behind, learn, prompt, request, tiers  # noqa: E402
from support.queued import scheduler_of  # noqa: E402


def test_tenants_share_nothing_on_disk_nor_after_a_restart(make, ids, tmp_path) -> None:
    options = {"disk_mb": 64, "directory": str(tmp_path)}
    first = make(**options)
    learn(first, request(*prompt(ids), salt="a"))
    first.library.store.disk.finish()
    first.library.store.disk.store.close()
    second = make(**options)
    assert tiers(second, request(*prompt(ids), salt="a")) == ["disk"] * 3
    assert tiers(second, request(*prompt(ids), salt="b")) == [None] * 3
    assert tiers(second, request(*prompt(ids))) == [None] * 3


def test_an_extra_key_a_salt_and_an_adapter_keep_kv_apart(make, ids) -> None:
    engine = make()
    fields = [{}, {"extra_key": "a"}, {"cache_salt": "a"}, {"extra_key": "a", "cache_salt": "a"}]
    fields.append({"extra_key": "aadapter", "lora_id": "adapter"})
    states = []
    for one in fields:
        req = request(*prompt(ids))
        vars(req).update(one)
        states.append(engine.new_request(req))
    assert len({state.keys for state in states}) == len(fields)
    assert [state.tenant for state in states] == [None, "a/", "a", "a/a", "a/"]


def test_a_deletion_reaches_every_version_the_queue_and_the_checks(make, ids, tmp_path) -> None:
    engine = make(disk_mb=64, directory=str(tmp_path))
    engine.checker.meter.every = 1
    document = ids[SYSTEM : SYSTEM + LENGTH].tolist()
    for tenant in ("a", "b"):
        for system in (2, 3, 4):
            learn(engine, behind(system, document, tenant))
        served = behind(2, document, tenant)
        state = engine.new_request(served)
        state.fused = True
        engine.offer_check(served, state)
    for tenant in ("a", "b"):
        for length in (4, 5):
            engine.library.encoder.enqueue(document * length, (), tenant, tenant)
    engine.library.encoder.step()  # one of them is in progress
    server = scheduler_of(engine)
    server.tree_cache = None
    assert delete_documents(server, ["a"])
    for system in (2, 3, 4):
        assert tiers(engine, behind(system, document, "a")) == [None]
        assert tiers(engine, behind(system, document, "b")) == ["host"]
    assert [one.request.tenant for one in engine.checker.waiting] == ["b"]
    job = engine.library.encoder._job
    waiting = {one.tenant for one in engine.library.encoder.queue.waiting}
    assert waiting | ({job.chunk.tenant} if job else set()) == {"b"}
    assert not delete_documents(server, ["a"])
    assert not delete_documents(server, [""])


def test_a_running_request_does_not_restore_a_deleted_document(make, ids) -> None:
    engine, document = make(), ids[SYSTEM : SYSTEM + LENGTH].tolist()
    under_way = behind(2, document)
    state = engine.new_request(under_way)
    engine.library.delete(None)
    engine.library.delete("a")
    state.fused = True
    engine.encode_missing(under_way, state, torch.arange(len(under_way.origin_input_ids)))
    assert not engine.library.encoder.busy
    learn(engine, behind(2, document, "b"))
    assert tiers(engine, behind(2, document, "b")) == ["host"], "another tenant's"
    learn(engine, behind(2, document))
    assert tiers(engine, behind(2, document)) == ["host"], "it was sent again since"
