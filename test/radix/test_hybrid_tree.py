"""Canopy's policy on full attention, together with SGLang's sliding windows and recurrent states."""

import pytest

from support.hybrid_tree import FULL, HYBRIDS, MAMBA, SWA, HybridTree

KINDS = pytest.mark.parametrize("kind", HYBRIDS)
CORES = pytest.mark.parametrize(
    "core", ["sglang", "canopy-lru", "wa", "threshold-lru", "canopy-tlru"]
)


def sequence(tree: HybridTree, start: int, pages: int) -> list[int]:
    return tree.steps._make_seq(start, pages)


@CORES
@KINDS
def test_pools_balance_through_serving_locking_and_evicting(kind, core) -> None:
    tree = HybridTree(kind, core)
    first = sequence(tree, 1, 6)
    page = tree.cfg.page_size
    second = first[: 3 * page] + sequence(tree, 500, 3)
    tree.serve(first, 1.0)
    tree.recount()
    tree.serve(second, 2.0)
    tree.recount()
    assert tree.match(second).device_prefix_len == len(second)
    lock = tree.lock(second)
    tree.evict(full=len(first), swa=len(first) if tree.has_swa else 0, mamba=6)
    tree.recount()
    assert tree.match(second).device_prefix_len == len(second)
    tree.cache.unlock(lock)
    tree.recount()
    tree.evict(full=200)
    tree.recount()
    assert tree.available(FULL) == tree.cfg.kv_size


@KINDS
def test_a_requests_fields_reach_its_nodes(kind) -> None:
    tree = HybridTree(kind, "wa")
    tokens = sequence(tree, 1, 8)
    tree.serve(tokens, 3.0, category="chat", turn=2)
    for node in tree.nodes():
        assert node.canopy.turn == 2
        assert node.canopy.last_access == 3.0


@pytest.mark.parametrize("core", ["canopy-lru", "wa"])
def test_a_leaf_with_a_state_is_evicted_whole_and_its_neighbours_stay(core) -> None:
    """Its state is at its end: a shorter leaf would hold KV that no request can use."""
    tree = HybridTree("mamba", core)
    old, young = sequence(tree, 1, 8), sequence(tree, 100, 8)
    tree.serve(old, 1.0)
    tree.serve(young, 2.0)
    tree.evict(full=1)
    assert tree.match(old).device_prefix_len == 0
    assert tree.match(young).device_prefix_len == 8
    assert tree.available(FULL) == tree.cfg.kv_size - 8
    tree.recount()


@pytest.mark.parametrize("core", ["canopy-lru", "wa"])
def test_a_cut_that_leaves_a_whole_window_is_made(core) -> None:
    tree = HybridTree("swa", core, kv_size=200)
    tokens = sequence(tree, 1, 130)
    tree.serve(tokens, 1.0)
    tree.evict(full=1)
    left = tree.match(tokens).device_prefix_len
    assert 0 < left < 130
    tree.recount()


@pytest.mark.parametrize("core", ["canopy-lru", "wa"])
def test_unusable_kv_is_evicted_before_older_kv(core) -> None:
    """Its state is gone, so that a lookup stops above it."""
    tree = HybridTree("mamba", core)
    old, young = sequence(tree, 1, 4), sequence(tree, 100, 8)
    tree.serve(young, 1.0)
    tree.serve([*young, 900, 901], 2.0)
    tree.serve(old, 1.5)
    # The tip of the younger path is evicted, and with it the only state below its parent.
    tip = tree.core.node_by_id(tree.match([*young, 900, 901]).last_device_node)
    head = tip.parent
    actions: list = []
    frees = {FULL: [], MAMBA: []}
    tree.core._evict_component_and_detach_lru(
        head, tree.cache.components[MAMBA], frees, {}, actions, tracker=None
    )
    tree.cache._free_values(frees, {})
    lock = tree.lock(old)
    tree.evict(full=2)
    tree.cache.unlock(lock)
    tree.recount()
    tree.evict(full=1)
    assert tree.match(old).device_prefix_len == 4
    assert [node.canopy.length for node in tree.nodes()] == [4]
    tree.recount()


@KINDS
def test_a_flush_frees_every_slot(kind) -> None:
    tree = HybridTree(kind, "wa")
    tree.serve(sequence(tree, 1, 5), 1.0)
    tree.evict(full=1000)
    assert tree.available(FULL) == tree.cfg.kv_size
    if tree.has_swa:
        assert tree.available(SWA) == tree.cfg.kv_size
    if tree.has_mamba:
        assert tree.available(MAMBA) == tree.cfg.mamba_cache_size
