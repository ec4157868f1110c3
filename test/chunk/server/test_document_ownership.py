"""Documents of tenants in an engine: names, pins, deletion, versions."""

import pytest

torch = pytest.importorskip("torch")

from canopy_chunks.server.engine import ChunkEngine  # noqa: E402
from canopy_chunks.text.documents import document_name  # noqa: E402
from support.chunk_engine import LENGTH, SYSTEM, behind, learn, prompt, request, tiers  # noqa: E402


def test_a_document_of_an_earlier_run_is_deleted_from_disk_too(make, ids, tmp_path) -> None:
    options = {"disk_mb": 64, "directory": str(tmp_path)}
    first = make(**options)
    first.library.store._tiers[0].capacity_bytes = 0  # nothing fits in memory
    req = request(*prompt(ids))
    learn(first, req)
    assert tiers(first, req) == ["disk"] * 3
    second = make(**options)
    assert tiers(second, req) == ["disk"] * 3
    learn(second, req)
    name = document_name(ids[SYSTEM : SYSTEM + LENGTH].tolist(), None)
    assert second.library.command("pin", name, None)
    assert second.library.command("unpin", name, None)
    assert second.library.command("delete", name, None)
    assert tiers(second, req) == [None, "disk", "disk"]
    assert len(list(tmp_path.rglob("*.chunk"))) == 2


def test_tenants_share_nothing_on_disk_nor_after_a_restart(make, ids, tmp_path) -> None:
    options = {"disk_mb": 64, "directory": str(tmp_path)}
    first = make(**options)
    first.library.store._tiers[0].capacity_bytes = 0
    learn(first, request(*prompt(ids), salt="a"))
    for engine in (first, make(**options)):
        assert tiers(engine, request(*prompt(ids), salt="a")) == ["disk"] * 3
        assert tiers(engine, request(*prompt(ids), salt="b")) == [None] * 3
        assert tiers(engine, request(*prompt(ids))) == [None] * 3


def test_versions_and_names_that_were_evicted_are_not_remembered(make, ids) -> None:
    engine = make()
    store, document = engine.library.store, ids[SYSTEM : SYSTEM + LENGTH].tolist()
    for i in range(6):
        learn(engine, behind(i, document))
        for key, *_ in store.listing()[:-1]:
            store.delete(key)
    assert len(store.of_document(document_name(document, None))) <= 2
    for tenant in ("a", "b"):
        learn(engine, request(*prompt(ids), salt=tenant))
    assert len(store._documents) == 1 + 2 * 3
    for key, *_ in store.listing():
        store.delete(key)
    assert not store._documents


def test_every_version_of_a_pinned_document_is_pinned(make, ids) -> None:
    engine = make()
    document = ids[SYSTEM : SYSTEM + LENGTH].tolist()
    name = document_name(document, None)

    def pins() -> list[int]:
        return [pins for *_, pins in engine.library.store.listing()]

    assert not engine.library.command("pin", name, None)
    learn(engine, behind(0, document))
    assert engine.library.command("pin", name, None)
    learn(engine, behind(1, document))
    assert pins() == [1, 1]
    for key, *_ in engine.library.store.listing()[:1]:
        engine.library.store.delete(key)
    learn(engine, behind(0, document))
    assert pins() == [1, 1]
    assert engine.library.command("unpin", name, None)
    assert pins() == [0, 0]
    assert not engine.library.command("unpin", name, None)


def learned_bytes(engine: ChunkEngine, ids) -> int:
    """The size of one chunk, which is forgotten again."""
    learn(engine, request(*prompt(ids, (0,)), salt="size"))
    ((key, *_),) = engine.library.store.listing()
    size = engine.library.store.size(key)
    engine.library.store.delete(key)
    return size


def test_a_tenants_pins_are_bounded_and_those_of_all_tenants(make, ids) -> None:
    engine = make()
    size = learned_bytes(engine, ids)
    (tier,) = engine.library.store._tiers
    tier.capacity_bytes = 24 * size  # a tenth: 2 chunks, a quarter: 6
    asked, done = [], []
    for tenant in "abcd":
        learn(engine, request(*prompt(ids), salt=tenant))
        for i in range(3):
            start = SYSTEM + i * LENGTH
            name = document_name(ids[start : start + LENGTH].tolist(), tenant)
            asked.append((name, tenant))
            done.append(engine.library.command("pin", name, tenant))
    assert done == [True, True, False] * 3 + [False] * 3
    assert engine.stats()["pinned_bytes"] == 6 * size
    assert not engine.library.command("unpin", asked[0][0], "b")  # another's
    assert engine.library.command("unpin", *asked[0])
    assert engine.library.command("pin", *asked[2])
    assert engine.library.command("delete", *asked[1])
    assert engine.stats()["pinned_bytes"] == 5 * size
    engine.library.store.check()


def test_a_reading_looks_at_no_stored_chunk(make, ids, monkeypatch) -> None:
    engine = make()
    for tenant in "ab":
        learn(engine, request(*prompt(ids), salt=tenant))
        for i in range(3):
            start = SYSTEM + i * LENGTH
            name = document_name(ids[start : start + LENGTH].tolist(), tenant)
            assert engine.library.command("pin", name, tenant)
    looked: list[str] = []
    monkeypatch.setattr(engine.library.store, "_find", looked.append)
    found = engine.stats()
    assert (found["pinned_chunks"], found["pinned_bytes"] > 0, looked) == (6, True, [])


def test_nothing_of_a_tenant_is_reached_by_the_name_of_its_document(make, ids) -> None:
    engine = make()
    learn(engine, request(*prompt(ids), salt="a"))
    name = document_name(ids[SYSTEM : SYSTEM + LENGTH].tolist(), "a")
    for other in (None, "b", "a/"):
        for verb in ("pin", "unpin", "delete"):
            assert not engine.library.command(verb, name, other)
    assert tiers(engine, request(*prompt(ids), salt="a")) == ["host"] * 3
    assert engine.library.command("pin", name, "a")


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


def test_a_document_is_deleted_in_every_version_of_an_earlier_run(make, ids, tmp_path) -> None:
    options = {"disk_mb": 64, "directory": str(tmp_path)}
    first = make(**options)
    first.library.store._tiers[0].capacity_bytes = 0  # nothing fits in memory
    document = ids[SYSTEM : SYSTEM + LENGTH].tolist()
    for system in (2, 3, 4):
        learn(first, behind(system, document))
    learn(first, behind(2, document, "other tenant"))
    second = make(**options)
    assert second.library.command("delete", document_name(document, None), None)
    assert [tiers(second, behind(n, document)) for n in (2, 3, 4)] == [[None]] * 3
    assert tiers(second, behind(2, document, "other tenant")) == ["disk"]
    assert len(list(tmp_path.rglob("*.chunk"))) == 1


def test_a_tenant_with_very_many_documents_can_still_delete_the_oldest(make, ids) -> None:
    engine = make()
    documents = [[i, *ids[: LENGTH - 1].tolist()] for i in range(8)]
    for document in documents:
        learn(engine, behind(2, document))
    for document in documents:
        assert engine.library.command("delete", document_name(document, None), None)
    assert not len(engine.library.store)


def test_a_running_request_does_not_restore_a_deleted_document(make, ids) -> None:
    engine = make()
    store, document = engine.library.store, ids[SYSTEM : SYSTEM + LENGTH].tolist()
    name = document_name(document, None)
    under_way = [behind(n, document) for n in (2, 3)]
    states = [engine.new_request(req) for req in under_way]
    engine.library.command("delete", name, None)
    engine.library.command("delete", document_name(document, "a"), "a")
    for req, state in zip(under_way, states):
        state.fused = True
        engine.encode_missing(req, state, torch.arange(len(req.origin_input_ids)))
    learn(engine, behind(2, document, "b"))
    assert not store.of_document(name)
    assert store.of_document(document_name(document, "b")), "another tenant's"
    learn(engine, behind(2, document))
    assert store.of_document(name), "it was sent again since"
