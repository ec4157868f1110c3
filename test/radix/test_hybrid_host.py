"""Host memory below sliding windows and recurrent states: evicted nodes are loaded whole."""

from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any

import pytest

from sglang_canopy.radix.counters import DEVICE, HOST
from support.hybrid_tree import FULL, HYBRIDS, MAMBA, SWA, HybridTree

KINDS = pytest.mark.parametrize("kind", HYBRIDS)
CORES = pytest.mark.parametrize("core", ["sglang", "canopy-lru", "wa"])
WRITES = pytest.mark.parametrize("write", ["write_through", "write_back"])


@contextmanager
def hybrid(*args: Any, **options: Any) -> Iterator[HybridTree]:
    with closing(HybridTree(*args, **options)) as tree:
        yield tree


def sequence(tree: HybridTree, start: int, pages: int) -> list[int]:
    return tree.steps._make_seq(start, pages)


@WRITES
@CORES
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
