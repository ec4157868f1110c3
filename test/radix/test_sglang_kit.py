"""SGLang's own fixtures and fuzz, on SGLang's core and on Canopy's."""

import itertools
from collections import defaultdict

import pytest
import torch
from sglang.srt.mem_cache.base_prefix_cache import EvictParams
from sglang.test.kits.unified_radix_cache import insert_walk
from sglang.test.kits.unified_radix_cache.insert_walk import SegmentLockFuzzFixtures
from sglang.test.kits.unified_radix_cache.storage import UnifiedRadixCacheStorageFixtures

from sglang_canopy.storage.page_table import PAGES
from support.kit_tree import CORE_NAMES, FULL, FULL_CONFIGS, KitTree

ALL_CORES = pytest.mark.parametrize("core", CORE_NAMES)


@ALL_CORES
@pytest.mark.parametrize("seed", range(6))
def test_locks_inserts_and_evictions_of_sglangs_fuzz(kit_tree, monkeypatch, core, seed) -> None:
    """SGLang's fuzz checks the tree after each of its steps; here the pool is recounted too."""
    tree = kit_tree(FULL_CONFIGS[0], core, step_class=SegmentLockFuzzFixtures)
    cache, allocator = tree.cache, tree.allocator
    sanity_check, original_lock = cache.sanity_check, cache.inc_lock_ref

    def lock_without_window(node, **options):
        receipt = original_lock(node, **options)
        receipt.component_lock_uuids = defaultdict(lambda: None, receipt.component_lock_uuids)
        return receipt

    cache.sanity_check = lambda: tree.recount(sanity_check)
    # The fuzz also uses sliding windows, which this model lacks.
    cache.inc_lock_ref = lock_without_window
    allocator.free_swa = lambda slots: None
    monkeypatch.setattr(insert_walk, "build_fixture", lambda cfg: (cache, allocator, tree.pool))
    tree.kit_steps._run_seed(seed)


@pytest.mark.parametrize("backend", ["file", "canopy"])
@ALL_CORES
def test_buffer_only_host_memory_returns_the_same_kv(kit_tree, tmp_path, core, backend) -> None:
    def build() -> KitTree:
        tree = kit_tree(FULL_CONFIGS[1], core, step_class=UnifiedRadixCacheStorageFixtures)
        tree.add_host_buffer(str(tmp_path), backend)
        return tree

    tree = build()
    tokens = tree.kit_steps._make_seq(1, 6)
    tree.insert(tokens)
    node = tree.match(tokens).last_device_node
    slots = tree.cache.path_device_indices(node)
    tree.kit_steps._fill_full_kv(tree.allocator, slots, marker=7)
    written_kv = tree.kit_steps._snapshot_full_kv(tree.allocator, slots)
    tree.kit_steps._buffer_backup_and_wait(tree.cache, node)
    tree.recount()
    tree.close()

    tree = build()
    assert tree.fetch(tokens) == len(tokens)
    slots = tree.cache.path_device_indices(tree.match(tokens).last_device_node)
    read_kv = tree.kit_steps._snapshot_full_kv(tree.allocator, slots)
    assert all(map(torch.equal, read_kv, written_kv))
    tree.recount()


def test_a_prompt_that_sglang_inserts_again_with_its_answer_is_used_once(kit_tree) -> None:
    tree = kit_tree(FULL_CONFIGS[1], "wa", step_class=UnifiedRadixCacheStorageFixtures)
    core, tokens = tree.cache.tree_core, tree.kit_steps._make_seq(1, 3)
    answer_tokens = tree.cache_config.page_size
    prompt, answer = tokens[:-answer_tokens], tokens[-answer_tokens:]
    kit_steps = tree.kit_steps
    req, _ = kit_steps._make_inflight_req(tree.cache, tree.allocator, tree.pool, prompt, answer)
    req.sampling_params.custom_params = {"canopy": {"time": 1.0}}
    core.clock.advance(5.0)  # another request has arrived meanwhile
    tree.cache.checkpoint(req, up_to=len(tokens))
    leaves = [node.canopy for node in core._node_arena.values() if node is not core.root_node]
    assert {(leaf.hits, leaf.last_access - req.canopy.request.time) for leaf in leaves} == {(1, 0)}


def test_pages_written_through_a_buffer_have_their_metadata_on_disk(kit_tree, tmp_path) -> None:
    PAGES.clear()
    tree = kit_tree(FULL_CONFIGS[1], "wa", step_class=UnifiedRadixCacheStorageFixtures)
    tree.add_host_buffer(str(tmp_path), "canopy")
    kit_steps, tokens = tree.kit_steps, tree.kit_steps._make_seq(1, 3)
    req, _ = kit_steps._make_inflight_req(tree.cache, tree.allocator, tree.pool, tokens)
    req.sampling_params.custom_params = {"canopy": {"time": 1.0, "turn": 3}}
    req.cache_salt = "tenant"
    tree.cache.checkpoint(req, up_to=len(tokens))
    node = req.last_node
    tree.kit_steps._buffer_backup_and_wait(tree.cache, node)
    store = tree.cache.cache_controller.storage_backend.store
    page_metas = store.meta(tree.kit_steps._all_page_hashes(tree.cache, node))
    assert [(meta.offset, meta.turn, meta.tenant) for meta in page_metas] == [
        (4 * i, 3, tree.cache.tree_core.node_by_id(node).canopy.tenant) for i in range(3)
    ]
    assert page_metas[0].tenant


class SeededError(Exception):
    pass


def raise_at(call_number: int, function):
    """Return ``function``, which raises ``SeededError`` at its ``call_number``-th call."""
    calls = itertools.count(1)

    def call_or_raise(*args, **kwargs):
        if next(calls) == call_number:
            raise SeededError
        return function(*args, **kwargs)

    return call_or_raise


@ALL_CORES
@pytest.mark.parametrize("has_host", [False, True], ids=["device", "host"])
def test_an_eviction_that_raises_loses_no_slot(kit_tree, monkeypatch, core, has_host) -> None:
    tree = kit_tree(FULL_CONFIGS[1], core)
    if has_host:
        tree.add_host_tier({})
    for first_token in (1, 2000, 4000, 6000):
        tree.insert(tree.kit_steps._make_seq(first_token, 2))
    events = tree.cache.tree_core.kv_events
    monkeypatch.setattr(events, "record_remove", raise_at(3, events.record_remove))
    with pytest.raises(SeededError):
        tree.cache.evict(EvictParams(num_tokens=4 * 2 * tree.cache_config.page_size))
    tree.recount()
    tree.cache.evict(EvictParams(num_tokens=4 * 2 * tree.cache_config.page_size))
    assert tree.allocator.available_size() == tree.allocator.size
    tree.recount()


@pytest.mark.parametrize("method", ["floor_cache_len", "begin_insert"])
def test_the_fields_of_an_insert_that_raised_reach_no_other_node(kit_tree, monkeypatch, method):
    tree = kit_tree(FULL_CONFIGS[1], "wa")
    cache, steps = tree.cache, tree.kit_steps
    core = cache.tree_core
    tokens = steps._make_seq(1, 2)
    req, _ = steps._make_inflight_req(cache, tree.allocator, tree.pool, tokens)
    req.sampling_params.custom_params = {"canopy": {"time": 1.0, "category": "chat"}}
    owner = core if method == "begin_insert" else cache.components[FULL]
    monkeypatch.setattr(owner, method, raise_at(1, getattr(owner, method)))
    with pytest.raises(SeededError):
        cache.checkpoint(req, up_to=len(tokens))
    other_tokens = steps._make_seq(5000, 2)
    tree.insert(other_tokens)
    leaf = core.node_by_id(tree.match(other_tokens).last_device_node).canopy
    assert (leaf.category, leaf.request_number) == ("default", -1)
