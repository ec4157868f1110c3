"""``sglang-tlru`` against SGLang's own tree under ``tlru``.

Both receive the same prompts, and their hits and evictions must be equal. SGLang refreshes both
parts of a node that it splits, so no prompt here branches off inside a node."""

import random
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sglang.srt.mem_cache.evict_policy import TLRUStrategy

from sglang_canopy.policy.block_tree import RadixTree
from sglang_canopy.policy.registry import make_policy
from sglang_canopy.records import Leaf, Request
from support.live_tree import LiveTree
from support.tree_recount import recount

PAGE_TOKENS = 4
CAPACITY_BLOCKS = 40


@settings(max_examples=300)
@given(
    threshold_tokens=st.integers(0, 200),
    next_prompt_tokens=st.integers(0, 200),
    nodes=st.lists(st.tuples(*[st.integers(1, 200)] * 3), min_size=2, max_size=8),
)
def test_leaves_are_ordered_as_by_sglangs_strategy(threshold_tokens, next_prompt_tokens, nodes):
    strategy = TLRUStrategy(threshold=threshold_tokens, next_prompt_estimate=next_prompt_tokens)
    options = {"threshold_tokens": threshold_tokens, "next_prompt_tokens": next_prompt_tokens}
    policy = make_policy("sglang-tlru", options)
    priorities = {}
    for time, (offset, length, later_tokens) in enumerate(nodes):
        leaf = Leaf(offset, length)
        leaf.history, leaf.last_access = offset + length + later_tokens, float(time)
        node = SimpleNamespace(
            key=range(length),
            last_access_time=time,
            _tlru_history_len=leaf.history,
            _tlru_cached_prefix_len=offset + length,
        )
        priorities[leaf] = strategy.get_priority(node)
        policy.admit(leaf, float(time))
    victims = []
    while (victim := policy.victim(99.0)) is not None:
        victims.append(victim.leaf)
        policy.drop(victim.leaf)
    assert victims == sorted(priorities, key=priorities.__getitem__)


def prompts_in_turn(seed: int) -> list[list[int]]:
    """Return the prompts of growing conversations, in whole pages."""
    rng = random.Random(seed)
    conversations: dict[int, list[int]] = {}
    turns = []
    for _ in range(150):
        conversation = rng.randrange(12)
        if conversation not in conversations or rng.random() < 0.08:
            conversations[conversation] = []
        new_blocks = [rng.randrange(10, 10**6) for _ in range(rng.randint(1, 5))]
        conversations[conversation] = conversations[conversation] + new_blocks
        if len(conversations[conversation]) > CAPACITY_BLOCKS // 2:
            del conversations[conversation]
            continue
        turns.append(conversations[conversation])
    return turns


def path_of(blocks: list[int]) -> dict[str, Any]:
    path = [hash((*blocks[: i + 1],)) for i in range(len(blocks))]
    return {"path": path, "block_tokens": PAGE_TOKENS, "prompt_tokens": len(blocks) * PAGE_TOKENS}


TLRU_OPTIONS = [(0, 0), (24, 8), (48, 12), (60, 0)]


@pytest.mark.parametrize(("threshold_tokens", "next_prompt_tokens"), TLRU_OPTIONS)
def test_hits_are_those_of_sglangs_own_tree(threshold_tokens: int, next_prompt_tokens: int) -> None:
    hits_over_lru = 0
    for seed in range(4):
        config = {"threshold": threshold_tokens, "next_prompt_estimate": next_prompt_tokens}
        sglang = {"page_size": PAGE_TOKENS, "sglang_core": "python"}
        sglang_tree = LiveTree(CAPACITY_BLOCKS * PAGE_TOKENS, "tlru", config, **sglang)
        options = {"threshold_tokens": threshold_tokens, "next_prompt_tokens": next_prompt_tokens}
        policy = make_policy("sglang-tlru", options)
        tree = RadixTree(policy, CAPACITY_BLOCKS, PAGE_TOKENS, whole_nodes=True)
        lru_tree = RadixTree(make_policy("lru"), CAPACITY_BLOCKS, PAGE_TOKENS, whole_nodes=True)
        for time, blocks in enumerate(prompts_in_turn(seed)):
            tokens = [block for block in blocks for _ in range(PAGE_TOKENS)]
            request = Request(time=float(time), **path_of(blocks))
            hit_tokens = tree.access(request) * PAGE_TOKENS
            assert hit_tokens == sglang_tree.match(tokens), (seed, time)
            sglang_tree.insert(tokens)
            hits_over_lru += hit_tokens - lru_tree.access(request) * PAGE_TOKENS
            recount(tree)
    assert (hits_over_lru == 0) == (threshold_tokens <= next_prompt_tokens)


def test_the_rest_of_a_split_leaf_may_be_beyond_the_budget() -> None:
    policy = make_policy("sglang-tlru", {"threshold_tokens": 5})
    tree = RadixTree(policy, 13, 1)
    # The oldest path is shorter than the threshold: all of it is free. The last request splits
    # the second path at token 5: 10 - 5 tokens are needed, the others are free.
    for time, path in enumerate(((9, 8, 7), range(20, 30), range(20, 25))):
        tree.access(Request(time=float(time), path=tuple(path), prompt_tokens=len(path)))
    assert [policy.rank(leaf) for leaf in policy.leaves()] == [False, False]
    recount(tree)
