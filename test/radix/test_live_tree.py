"""The real ``UnifiedRadixCache`` with Canopy in it, on CPU tensors."""

from typing import Any

import pytest
from sglang.srt.mem_cache.unified_cache.unified_tree_core import UnifiedTreeCore

from support.live_tree import LiveTree, check, fake_req

ONE_TOKEN = {"quantum_tokens": 1}


@pytest.mark.parametrize(
    ("config", "left"),
    [(ONE_TOKEN, 7), ({"whole_nodes": True}, 0)],  # as many tokens as are needed; SGLang's way
)
def test_evicts_the_needed_tokens_or_whole_nodes(config, left) -> None:
    tree = LiveTree(16, config=config)
    tree.serve(list(range(10)), time=1)
    tree.serve([100, 101, 102, 103], time=2)
    tree.serve([200, 201, 202, 203, 204], time=3)  # 3 tokens short
    assert tree.match(list(range(10))) == left
    assert tree.match([100, 101, 102, 103]) == 4
    check(tree)


def test_inserting_a_path_twice_counts_one_use() -> None:
    tree = LiveTree(64)
    request = tree.request(1.0)
    tree.insert([1, 2, 3, 4], request)
    tree.insert([1, 2, 3, 4, 5, 6], request)
    leaf = next(n.canopy for n in tree.core._node_arena.values() if n.canopy.length == 4)
    assert leaf.hits == 1


def test_after_a_failed_insert_no_request_is_being_inserted(monkeypatch):
    tree, seen = LiveTree(64), []

    def fails(core: Any, *_: Any, **__: Any) -> None:
        seen.append(core.inserting)
        raise KeyError

    monkeypatch.setattr(UnifiedTreeCore, "_add_new_node", fails)
    request = tree.request(1.0)
    with pytest.raises(KeyError):
        tree.insert([1, 2, 3, 4], request)
    assert seen == [request]
    assert tree.core.inserting is None


def test_asking_whether_the_server_is_well_is_no_traffic() -> None:
    """Health probes arrive every few seconds. They are not traffic, and no policy learns from them."""
    tree = LiveTree(64, "wa", config=ONE_TOKEN)
    (learner,) = tree.core.live.learners
    for rid, requests in (("HEALTH_CHECK_1f", 0), ("1f", 1)):
        req = fake_req(list(range(200)), [1], rid=rid)
        assert tree.core.requests.register(req) is tree.core.requests.register(req)
        tree.core.requests.ended(req)
        assert sum(row.requests for row in tree.core.live.counters.rows()) == requests
        assert bool(learner.model.stats()["block_hashes"]) == bool(requests)


def test_tenants_with_different_salts_share_nothing() -> None:
    tree = LiveTree(64)
    tree.insert([1, 2, 3, 4], salt="a")
    assert tree.match([1, 2, 3, 4], salt="b") == 0
    assert tree.match([1, 2, 3, 4], salt="a") == 4


def test_a_node_from_storage_takes_its_parents_attributes() -> None:
    from array import array

    from sglang.srt.mem_cache.radix_cache import RadixKey

    tree = LiveTree(32, "wa", ONE_TOKEN, host_tokens=64)
    tree.serve([1, 2, 3, 4], time=1, category="chat", conversation="c", turn=2)
    node = next(n for n in tree.core._node_arena.values() if n.parent is not None)
    slots = tree.cache.cache_controller.mem_pool_host.alloc(4)
    key = RadixKey(array("q", [5, 6, 7, 8]), None)
    tree.core.insert_host(node.id, key, slots, ["hash"] * 4)
    tree.request(9.0)  # the next arrival updates the policies
    loaded = next(n.canopy for n in node.children.values())
    assert (loaded.offset, loaded.length, loaded.hits) == (4, 4, 1)
    assert (loaded.category, loaded.turn) == (node.canopy.category, 2)
    assert loaded in list(tree.core.live.host_policy.leaves())
    check(tree)
