"""Documents of tenants: separate in an engine, and deleted completely, in SGLang's tree too."""

import time

import pytest
import torch
from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams

from canopy_documents.server.scheduler import delete_documents, delete_kv
from sglang_canopy.tenant import documents_key, tenants_of_key
from support.disk_tree import DiskTree
from support.document_engine import (
    DOCUMENT_END,
    SYSTEM_TOKENS,
    chunk_tiers,
    learn,
    prompt,
    request,
    request_after,
    scheduler_of,
)
from support.live_tree import LiveTree


def test_tenants_share_nothing_on_disk_nor_after_a_restart(make_engine, ids, tmp_path) -> None:
    options = {"disk_mb": 64, "directory": str(tmp_path)}
    first_engine = make_engine(**options)
    learn(first_engine, request(*prompt(ids), salt="a"))
    first_engine.library.store.disk.finish()
    first_engine.library.store.disk.store.close()
    second_engine = make_engine(**options)
    assert chunk_tiers(second_engine, request(*prompt(ids), salt="a")) == ["disk"] * 3
    assert chunk_tiers(second_engine, request(*prompt(ids), salt="b")) == [None] * 3
    assert chunk_tiers(second_engine, request(*prompt(ids))) == [None] * 3


def test_an_extra_key_a_salt_and_an_adapter_separate_kv(make_engine, ids) -> None:
    engine = make_engine()
    fields = [{}, {"extra_key": "a"}, {"cache_salt": "a"}, {"extra_key": "a", "cache_salt": "a"}]
    fields.append({"extra_key": "aadapter", "lora_id": "adapter"})
    document_requests = []
    for changed_fields in fields:
        req = request(*prompt(ids))
        vars(req).update(changed_fields)
        document_requests.append(engine.new_request(req))
    assert len({documents.keys for documents in document_requests}) == len(fields)
    assert [documents.tenant for documents in document_requests] == [None, "a/", "a", "a/a", "a/"]


def test_a_deletion_reaches_all_versions_the_queue_and_checks(make_engine, ids, tmp_path) -> None:
    engine = make_engine(disk_mb=64, directory=str(tmp_path))
    engine.checker.limits.interval = 1
    document = ids[SYSTEM_TOKENS:DOCUMENT_END].tolist()
    for tenant in ("a", "b"):
        for system in (2, 3, 4):
            learn(engine, request_after(system, document, tenant))
        req = request_after(2, document, tenant)
        document_request = engine.new_request(req)
        document_request.is_fused = True
        engine.offer_check(req, document_request)
    for tenant in ("a", "b"):
        for copies in (4, 5):
            engine.library.encoder.enqueue(document * copies, (), tenant, tenant)
    engine.library.encoder.step()  # one of them is in progress
    server = scheduler_of(engine)
    server.tree_cache = None
    assert delete_documents(server, ["a"])
    for system in (2, 3, 4):
        assert chunk_tiers(engine, request_after(system, document, "a")) == [None]
        assert chunk_tiers(engine, request_after(system, document, "b")) == ["host"]
    assert [waiting_check.request.tenant for waiting_check in engine.checker.waiting] == ["b"]
    encoding = engine.library.encoder._job
    waiting = {waiting_check.tenant for waiting_check in engine.library.encoder.queue.waiting}
    assert waiting | ({encoding.chunk.tenant} if encoding else set()) == {"b"}
    assert not delete_documents(server, ["a"])
    assert not delete_documents(server, [""])


def test_a_running_request_does_not_restore_a_deleted_document(make_engine, ids) -> None:
    engine, document = make_engine(), ids[SYSTEM_TOKENS:DOCUMENT_END].tolist()
    running_req = request_after(2, document)
    documents = engine.new_request(running_req)
    engine.library.delete(None)
    engine.library.delete("a")
    documents.is_fused = True
    engine.encode_missing(running_req, documents, torch.arange(len(running_req.origin_input_ids)))
    assert not engine.library.encoder.busy
    learn(engine, request_after(2, document, "b"))
    assert chunk_tiers(engine, request_after(2, document, "b")) == ["host"], "another tenant's"
    learn(engine, request_after(2, document))
    assert chunk_tiers(engine, request_after(2, document)) == ["host"], "it was sent again since"


PATH_A, PATH_B = list(range(40)), [*range(20), *range(100, 130)]


def cached_tokens(tree, path, extra_key, salt=None) -> int:
    """Return how many tokens of a path are on device and host."""
    match = tree.cache.match_prefix(MatchPrefixParams(key=tree.key(path, salt, extra_key)))
    return match.device_prefix_len + match.host_hit_length


@pytest.mark.parametrize("core", [None, "python"])
@pytest.mark.parametrize("host_tokens", [0, 600])
def test_a_tenants_kv_is_deleted(core, host_tokens) -> None:
    tree = LiveTree(600, "lru" if core else "canopy-lru", sglang_core=core, host_tokens=host_tokens)
    free_tokens = tree.allocator.available_size()
    keys = ["a", documents_key("a", "0" * 24), "b", None]
    for key in keys:
        for path in (PATH_A, PATH_B):
            tree.insert(path, extra_key=key)
    tree.insert(PATH_A, salt="s", extra_key="a")
    assert delete_kv(tree.cache, "a/")
    for key in keys[:2]:
        assert cached_tokens(tree, PATH_A, key) == cached_tokens(tree, PATH_B, key) == 0
    for key in keys[2:]:
        assert (cached_tokens(tree, PATH_A, key), cached_tokens(tree, PATH_B, key)) == (40, 50)
    assert cached_tokens(tree, PATH_A, "a", "s") == 40
    assert not delete_kv(tree.cache, "a/")
    for tenant in (None, "b/", "a/s"):
        assert delete_kv(tree.cache, tenant)
    assert tree.allocator.available_size() == free_tokens


def test_pages_that_only_the_disk_holds_count_as_deleted(tmp_path) -> None:
    tree = DiskTree(tmp_path / "disk")
    tree.serve(PATH_A[:8], 1.0, tenant="a/")
    tree.cache.release_host_resources()
    reopened = DiskTree(tmp_path / "disk")
    assert not delete_kv(reopened.cache, "b/")
    assert delete_kv(reopened.cache, "a/")
    while len(reopened.store):  # a thread deletes them
        time.sleep(0.01)
    assert not delete_kv(reopened.cache, "a/")
    reopened.close()


def test_kv_that_a_request_uses_stays_until_it_ends() -> None:
    tree = LiveTree(600)
    for path in (PATH_A, PATH_B):
        tree.insert(path, extra_key="a")
    match = tree.cache.match_prefix(MatchPrefixParams(key=tree.key(PATH_A, None, "a")))
    lock = tree.cache.lock(match.last_device_node)
    assert delete_kv(tree.cache, "a/")
    assert (cached_tokens(tree, PATH_A, "a"), cached_tokens(tree, PATH_B, "a")) == (40, 20)
    tree.cache.unlock(lock)
    assert delete_kv(tree.cache, "a/")
    assert cached_tokens(tree, PATH_A, "a") == 0


def test_an_adapters_kv_is_its_tenants() -> None:
    adapter = "0123456789abcdef" * 2
    for key, tenants in (
        (None, {None}),
        ("a", {"a/"}),
        (f"a/{adapter}", {f"a%2F{adapter}/", "a/"}),
        (adapter, {f"{adapter}/", None}),
        (documents_key(f"a{adapter}", "x"), {f"a{adapter}/", "a/"}),
    ):
        assert tenants_of_key(key, None, has_adapters=True) == tenants
    assert tenants_of_key(adapter, "salt") == {f"{adapter}/salt"}
    assert tenants_of_key("a/", None) == {"a%2F/"}
