"""Canopy's policy on full attention, together with SGLang's sliding windows and recurrent states, above host
memory too."""

import pytest

from sglang_canopy.radix.counters import DEVICE, HOST
from support.kit_tree import FULL, HYBRIDS, MAMBA, SWA, KitTree

EACH_HYBRID = pytest.mark.parametrize("hybrid", HYBRIDS)


def token_sequence(tree: KitTree, start: int, pages: int) -> list[int]:
    return tree.kit_steps._make_seq(start, pages)


@EACH_HYBRID
def test_a_requests_fields_reach_its_nodes(hybrid) -> None:
    tree = KitTree(hybrid, "wa")
    tree.serve(token_sequence(tree, 1, 8), 3.0, category="chat", turn=2)
    for node in tree.nodes():
        assert node.canopy.turn == 2
        assert node.canopy.last_access == 3.0


@pytest.mark.parametrize("policy", ["canopy-lru", "wa"])
def test_a_leaf_with_a_state_is_evicted_whole_and_no_other_is(policy) -> None:
    """The state is at the leaf's end: a shorter leaf would hold KV that no request can use."""
    tree = KitTree("mamba", policy)
    older, younger = token_sequence(tree, 1, 8), token_sequence(tree, 100, 8)
    tree.serve(older, 1.0)
    tree.serve(younger, 2.0)
    tree.evict(full=1)
    assert tree.match(older).device_prefix_len == 0
    assert tree.match(younger).device_prefix_len == 8
    assert tree.available_slots(FULL) == tree.cache_config.kv_size - 8
    tree.recount()


@pytest.mark.parametrize("policy", ["canopy-lru", "wa"])
def test_a_cut_leaves_a_whole_window(policy) -> None:
    tree = KitTree("swa", policy, kv_size=200)
    tokens = token_sequence(tree, 1, 130)
    tree.serve(tokens, 1.0)
    tree.evict(full=1)
    assert 0 < tree.match(tokens).device_prefix_len < 130
    tree.recount()


@pytest.mark.parametrize("policy", ["canopy-lru", "wa"])
def test_unusable_kv_is_evicted_before_older_kv(policy) -> None:
    """KV without its state cannot be matched: a look-up stops above it."""
    tree = KitTree("mamba", policy)
    older, younger = token_sequence(tree, 1, 4), token_sequence(tree, 100, 8)
    tree.serve(younger, 1.0)
    tree.serve([*younger, 900, 901], 2.0)
    tree.serve(older, 1.5)
    # The tip of the younger path is evicted, and with it the only state below its parent.
    parent = tree.core.node_by_id(tree.match([*younger, 900, 901]).last_device_node).parent
    actions: list = []
    freed = {FULL: [], MAMBA: []}
    tree.core._evict_component_and_detach_lru(
        parent, tree.cache.components[MAMBA], freed, {}, actions, tracker=None
    )
    tree.cache._free_values(freed, {})
    lock = tree.lock(older)
    tree.evict(full=2)
    tree.cache.unlock(lock)
    tree.recount()
    assert tree.core.evictable_device_leaves.lowest_ranked(100, 100)[0] == (parent, 0)
    tree.core.evictable_device_leaves.has_victim_expired = True  # of the eviction before
    tree.evict(full=1)
    assert not tree.core.evictable_device_leaves.has_victim_expired
    assert tree.match(older).device_prefix_len == 4
    assert [node.canopy.length for node in tree.nodes()] == [4]
    tree.recount()


EACH_WRITE_POLICY = pytest.mark.parametrize("write_policy", ["write_through", "write_back"])


@EACH_WRITE_POLICY
@pytest.mark.parametrize("policy", ["sglang", "canopy-lru", "wa"])
@EACH_HYBRID
def test_demoted_kv_is_found_on_the_host_and_loaded(kit_tree, hybrid, policy, write_policy) -> None:
    tree = kit_tree(hybrid, policy, write_policy=write_policy)
    tokens = token_sequence(tree, 1, 6)
    tree.serve(tokens, 1.0)
    tree.evict(full=len(tokens))
    tree.recount()
    assert tree.available_slots(FULL) == tree.cache_config.kv_size
    match = tree.match(tokens)
    assert (match.device_prefix_len, match.host_hit_length) == (0, len(tokens))
    assert tree.load_back(tokens) == len(tokens)
    tree.recount()
    if tree.has_mamba:
        assert len(tree.slots(MAMBA)) == 1
    if tree.has_swa:
        assert tree.cache_config.sliding_window_size <= len(tree.slots(SWA)) <= len(tokens)


@pytest.mark.parametrize("policy", ["canopy-lru", "wa"])
@pytest.mark.parametrize("hybrid", ["swa", "swa-pages"])
def test_a_tail_cut_from_a_leaf_keeps_its_window_below(kit_tree, hybrid, policy) -> None:
    tree = kit_tree(hybrid, policy, write_policy="write_back", kv_size=400, host_ratio=1.0)
    tokens = token_sequence(tree, 1, 40)
    tree.serve(tokens, 1.0)
    tree.evict(full=1)
    match = tree.match(tokens)
    assert 0 <= match.device_prefix_len < len(tokens)
    assert match.device_prefix_len + match.host_hit_length == len(tokens)
    tree.recount()


@pytest.mark.parametrize("policy", ["canopy-lru", "wa"])
@pytest.mark.parametrize("hybrid", ["mamba", "swa"])
def test_a_full_host_evicts_by_the_policy(kit_tree, hybrid, policy) -> None:
    tree = kit_tree(hybrid, policy, write_policy="write_back", host_ratio=0.8)
    prompt_tokens = tree.cache_config.kv_size // 4
    prompts = [token_sequence(tree, 1000 * number, prompt_tokens) for number in range(8)]
    for second, prompt in enumerate(prompts):
        tree.serve(prompt, float(second))
        tree.recount()
    tier_counts = tree.core.live.counters.category_counts("default").tiers
    assert sum(tier_counts[DEVICE].evicted_tokens) > 0
    assert sum(tier_counts[HOST].evicted_tokens) > 0
    hit_tokens = [tree.match(prompt).full_kv_hit_length for prompt in prompts]
    assert hit_tokens[0] == 0
    assert hit_tokens[-1] == prompt_tokens


def test_kv_with_its_state_on_the_host_is_usable(kit_tree) -> None:
    """No leaf is evicted as unusable."""
    tree = kit_tree("mamba", "canopy-lru", write_policy="write_through")
    prefix = token_sequence(tree, 1, 6)
    tree.serve(prefix, 1.0)
    tree.serve([*prefix, *token_sequence(tree, 500, 4)], 2.0)
    tree.evict(mamba=1)  # the older state, in the middle of the path
    tree.evict(full=4)  # and the leaf below it
    assert (tree.match(prefix).device_prefix_len, tree.slots(MAMBA)) == (0, [])
    assert len(tree.slots(FULL)) == len(prefix)
    tree.core.evictable_device_leaves.admit_pending()
    assert not tree.core.evictable_device_leaves.unusable_leaves
    tree.recount()
    assert tree.load_back(prefix) == len(prefix)
