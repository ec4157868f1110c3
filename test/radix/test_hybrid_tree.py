"""Canopy's policy on full attention, together with SGLang's sliding windows and recurrent states, above host
memory too."""

from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any

import pytest

from sglang_canopy.radix.counters import DEVICE, HOST
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


WRITES = pytest.mark.parametrize("write", ["write_through", "write_back"])


@contextmanager
def hybrid(*args: Any, **options: Any) -> Iterator[HybridTree]:
    with closing(HybridTree(*args, **options)) as tree:
        yield tree


@WRITES
@pytest.mark.parametrize("core", ["sglang", "canopy-lru", "wa"])
@KINDS
def test_demoted_kv_is_found_on_the_host_and_loaded(kind, core, write) -> None:
    with hybrid(kind, core, write=write) as tree:
        tokens = sequence(tree, 1, 6)
        tree.serve(tokens, 1.0)
        tree.evict(full=len(tokens))
        tree.recount()
        assert tree.available(FULL) == tree.cfg.kv_size
        hit = tree.match(tokens)
        assert (hit.device_prefix_len, hit.host_hit_length) == (0, len(tokens))
        assert tree.load_back(tokens) == len(tokens)
        tree.recount()
        if tree.has_mamba:
            assert len(tree.values(MAMBA)) == 1
        if tree.has_swa:
            assert tree.cfg.sliding_window_size <= len(tree.values(SWA)) <= len(tokens)


@pytest.mark.parametrize("core", ["canopy-lru", "wa"])
@pytest.mark.parametrize("kind", ["swa", "swa-pages"])
def test_a_tail_cut_from_a_leaf_keeps_its_window_below(kind, core) -> None:
    with hybrid(kind, core, write="write_back", kv_size=400, host_ratio=1.0) as tree:
        tokens = sequence(tree, 1, 40)
        tree.serve(tokens, 1.0)
        tree.evict(full=1)
        left = tree.match(tokens)
        assert 0 <= left.device_prefix_len < len(tokens)
        assert left.device_prefix_len + left.host_hit_length == len(tokens)
        tree.recount()


@pytest.mark.parametrize("core", ["canopy-lru", "wa"])
@pytest.mark.parametrize("kind", ["mamba", "swa"])
def test_a_full_host_evicts_by_the_policy(kind, core) -> None:
    with hybrid(kind, core, write="write_back", host_ratio=0.8) as tree:
        size = tree.cfg.kv_size // 4
        for number in range(8):
            tree.serve(sequence(tree, 1000 * number, size), float(number))
            tree.recount()
        rows = tree.core.live.counters.row("default").tiers
        assert sum(rows[DEVICE].evicted) > 0
        assert sum(rows[HOST].evicted) > 0
        found = [tree.match(sequence(tree, 1000 * n, size)).full_kv_hit_length for n in range(8)]
        assert found[0] == 0
        assert found[-1] == size


def test_kv_with_its_state_on_the_host_is_usable() -> None:
    """Its leaf is not evicted first."""
    with hybrid("mamba", "canopy-lru", write="write_through") as tree:
        first = sequence(tree, 1, 6)
        tree.serve(first, 1.0)
        tree.serve([*first, *sequence(tree, 500, 4)], 2.0)
        tree.evict(mamba=1)  # the older state, in the middle of the path
        tree.evict(full=4)  # and the leaf below it
        assert (tree.match(first).device_prefix_len, tree.values(MAMBA)) == (0, [])
        assert len(tree.values(FULL)) == len(first)
        tree.core.evictable_device_leaves.admit_pending()
        assert not tree.core.evictable_device_leaves.unusable
        tree.recount()
        assert tree.load_back(first) == len(first)
