"""``sglang-tlru`` against SGLang's own tree under ``tlru``.

Both receive the same prompts, and their hits and evictions must be equal. SGLang refreshes the rest
of a node when it splits it, so no prompt of both branches off inside one.
"""

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


def prompts(seed: int) -> list[list[int]]:
    """Return the prompts of growing conversations, in whole pages."""
    draw = random.Random(seed)
    conversations: dict[int, list[int]] = {}
    turns = []
    for _ in range(150):
        number = draw.randrange(12)
        if number not in conversations or draw.random() < 0.08:
            conversations[number] = []
        new_blocks = [draw.randrange(10, 10**6) for _ in range(draw.randint(1, 5))]
        conversations[number] = conversations[number] + new_blocks
        if len(conversations[number]) > CAPACITY_BLOCKS // 2:
            del conversations[number]
            continue
        turns.append(conversations[number])
    return turns


def path_of(blocks: list[int]) -> dict[str, Any]:
    path = [hash((*blocks[: i + 1],)) for i in range(len(blocks))]
    return {"path": path, "block_tokens": PAGE_TOKENS, "prompt_tokens": len(blocks) * PAGE_TOKENS}


BUDGETS_TOKENS = [(0, 0), (24, 8), (48, 12), (60, 0)]


@pytest.mark.parametrize(("threshold_tokens", "next_prompt_tokens"), BUDGETS_TOKENS)
def test_hits_are_those_of_sglangs_own_tree(threshold_tokens: int, next_prompt_tokens: int) -> None:
    hits_over_lru = 0
    for seed in range(4):
        config = {"threshold": threshold_tokens, "next_prompt_estimate": next_prompt_tokens}
        tokens = CAPACITY_BLOCKS * PAGE_TOKENS
        live = LiveTree(tokens, "tlru", config, page_size=PAGE_TOKENS, core="python")
        options = {"threshold_tokens": threshold_tokens, "next_prompt_tokens": next_prompt_tokens}
        policy = make_policy("sglang-tlru", options)
        tree = RadixTree(policy, CAPACITY_BLOCKS, PAGE_TOKENS, whole_nodes=True)
        lru = RadixTree(make_policy("lru"), CAPACITY_BLOCKS, PAGE_TOKENS, whole_nodes=True)
        for time, blocks in enumerate(prompts(seed)):
            tokens = [block for block in blocks for _ in range(PAGE_TOKENS)]
            request = Request(time=float(time), **path_of(blocks))
            hit_tokens = tree.access(request) * PAGE_TOKENS
            assert hit_tokens == live.match(tokens), (seed, time)
            live.insert(tokens)
            hits_over_lru += hit_tokens - lru.access(request) * PAGE_TOKENS
            recount(tree)
    assert (hits_over_lru == 0) == (threshold_tokens <= next_prompt_tokens)


def test_the_rest_of_a_split_leaf_may_be_beyond_the_budget() -> None:
    policy = make_policy("sglang-tlru", {"threshold_tokens": 5})
    tree = RadixTree(policy, 13, 1)
    # The oldest path is shorter than the threshold: all of it is free. The last request splits
    # the second at 5: 10 - 5 tokens are needed, the rest is free.
    for time, path in enumerate(((9, 8, 7), range(20, 30), range(20, 25))):
        tree.access(Request(time=float(time), path=tuple(path), prompt_tokens=len(path)))
    assert [policy.rank(leaf) for leaf in policy.leaves()] == [False, False]
    recount(tree)
