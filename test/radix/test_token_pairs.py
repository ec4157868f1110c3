"""Keys of token pairs, as in EAGLE and MTP, with a draft model's KV in addition to the target's."""

import dataclasses

import pytest
import torch
from sglang.srt.mem_cache.base_prefix_cache import EvictParams
from sglang.srt.mem_cache.hybrid_cache.hybrid_pool_assembler import build_hicache_draft_sidecars
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

from support.kit_tree import CORE_NAMES, FULL_CONFIGS, KitTree
from support.live_tree import LiveTree, check_tree

PAIR_CONFIGS = [dataclasses.replace(config, is_eagle=True) for config in FULL_CONFIGS[:3]]
EACH_CONFIG = pytest.mark.parametrize("config", PAIR_CONFIGS, ids=lambda config: config.label)


def matched_tokens(tree: KitTree, *paths: list[int]) -> list[int]:
    return [tree.match(path).device_prefix_len for path in paths]


@EACH_CONFIG
def test_every_core_matches_as_sglangs_core(kit_tree, config) -> None:
    hit_tokens = {}
    for core in CORE_NAMES:
        tree = kit_tree(config, core)
        first = tree.kit_steps._make_seq(1, 4)
        second = first[: 2 * config.page_size + 1] + tree.kit_steps._make_seq(5000, 2)
        tree.insert(first)
        tree.insert(second)
        prefixes = first[: config.page_size + 1], first[:1]
        hit_tokens[core] = matched_tokens(tree, first, second, *prefixes)
        tree.cache.sanity_check()
    assert set(map(tuple, hit_tokens.values())) == {tuple(hit_tokens["sglang"])}
    assert hit_tokens["sglang"][0] < 4 * config.page_size, "n tokens are n - 1 pairs"


def test_a_drafts_kv_follows_the_targets_through_the_host() -> None:
    """SGLang keeps a draft's KV at the target's slots; on the host it is a pool of its own."""
    options = {"page_size": 2, "host_tokens": 128, "write_policy": "write_back", "has_pairs": True}
    tree = LiveTree(32, "wa", {"block_tokens": 4}, **options)
    shape = {"head_num": 1, "head_dim": 4, "layer_num": 1, "dtype": torch.float16}
    draft_pool = MHATokenToKVPool(
        size=32, page_size=2, device="cpu", enable_memory_saver=False, **shape
    )
    sidecars = build_hicache_draft_sidecars(draft_device_pools=(draft_pool,), tree_cache=tree.cache)
    for pool_spec, pool_entry in zip(*sidecars, strict=True):
        tree.cache.register_sidecar_pool(pool_spec, pool_entry)
    first, second = list(range(1, 22)), list(range(501, 532))

    def slots(path: list[int]) -> torch.Tensor:
        match = tree.cache.match_prefix(tree.match_params(path))
        return tree.core.collect_full_device_indices(match.last_device_node, tree.core.root_node.id)

    tree.insert(first, tree.request(0.0, prompt_tokens=len(first)))
    computed = torch.arange(20, dtype=torch.float16) + 100
    draft_pool.k_buffer[0][slots(first)] = computed[:, None, None]
    tree.cache.evict(EvictParams(num_tokens=20))
    tree.settle()
    draft_pool.k_buffer[0].zero_()
    tree.insert(second, tree.request(1.0, prompt_tokens=len(second)))
    assert tree.load_back(first) == 20
    assert tree.kv(first) == first[:20]
    assert torch.equal(draft_pool.k_buffer[0][slots(first)][:, 0, 0], computed)
    check_tree(tree)
