"""ET-LRU: evicted tails, its floor, and its order without a target."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_canopy.policy.block_tree import RadixTree
from sglang_canopy.policy.registry import make_policy
from sglang_canopy.records import Leaf, Request
from sglang_canopy.reuse.exponential import Exponential
from sglang_canopy.reuse.survival import AGE_BINS, TOKEN_BINS, token_bin
from support.tree_recount import recount

LABEL = "default|-|turn1|out<64"


def policy_with(options, ranks=(1.0,), added_tokens=0):
    """Return a policy with one category: ``ranks`` by age bin, and next prompts that add ``added_tokens`` tokens."""
    policy = make_policy("etlru", options)
    category = policy.model.categories.refine(tuple(LABEL.split("|")))
    category.rank = [*ranks, *[ranks[-1]] * (AGE_BINS - len(ranks))]
    category.growth_exceedance = [float(i <= token_bin(added_tokens)) for i in range(TOKEN_BINS)]
    return policy


def leaf_of(policy, history, length, *, offset=0, time=0.0):
    leaf = Leaf(offset, length)
    leaf.history, leaf.last_access, leaf.category, leaf.hits = history, time, LABEL, 1
    policy.admit(leaf, time)
    return leaf


def test_spare_tokens_are_evicted_before_older_needed_ones():
    policy = policy_with({"threshold_tokens": 1000.0}, added_tokens=100)
    leaf_of(policy, history=5000, length=1000, time=0.0)
    spare = leaf_of(policy, history=900, length=900, time=5.0)
    assert policy.victim(6.0).leaf is spare


def test_the_floor_decides_between_tail_and_hits():
    # Rank 1 with the tail against rank 2 without: floor 0.3 gives 1 > 0.6, floor 0.9 the reverse.
    for floor, victim_name in ((0.3, "spare"), (0.9, "tail")):
        policy = policy_with({"threshold_tokens": 1000.0, "floor": floor}, added_tokens=100)
        other_category = policy.model.categories.refine(("other",))
        other_category.rank = [2.0] * AGE_BINS
        other_category.growth_exceedance = [0.0] * TOKEN_BINS
        leaves = {"tail": leaf_of(policy, history=5000, length=1000)}
        spare = Leaf(0, 900)
        spare.history, spare.category, spare.hits = 900, "other", 1
        policy.admit(spare, 0.0)
        leaves["spare"] = spare
        assert policy.victim(0.0).leaf is leaves[victim_name]


def test_without_a_target_it_ranks_as_wa():
    policy = policy_with({}, ranks=(1.0,))
    older = leaf_of(policy, history=100, length=100, time=0.0)
    leaf_of(policy, history=9000, length=100, time=1.0)
    assert policy.victim(2.0) == (older, 0)


def test_trims_to_the_next_change_of_the_tail_term():
    policy = policy_with({"threshold_tokens": 1000.0}, added_tokens=100)
    leaf = leaf_of(policy, history=2000, length=2000)
    # The last token has 1000 to spare, the bucket that holds 1000 begins at 724.1.
    victim = policy.victim(0.0)
    assert victim.leaf is leaf
    assert 2000 - victim.keep_tokens == pytest.approx(1000 - 724.1, abs=1)


def test_repeated_trims_end_when_the_rest_of_the_leaf_is_needed():
    policy = policy_with({"threshold_tokens": 1000.0}, added_tokens=100)
    leaf = leaf_of(policy, history=2000, length=2000)
    for _ in range(100):
        keep_tokens = policy.victim(0.0).keep_tokens
        if keep_tokens == 0:
            break
        assert keep_tokens < leaf.length
        policy.drop(leaf)
        leaf.length = keep_tokens
        policy.admit(leaf, 0.0)
    assert 2000 - 1000 - 16 <= leaf.length <= 2000 - 1000 + 16


REQUESTS = st.lists(st.tuples(st.integers(0, 8), st.integers(1, 6)), min_size=1, max_size=60)


@given(REQUESTS)
def test_with_threshold_0_and_equal_rates_it_orders_like_lru(requests):
    def evicted_runs(name, options):
        cuts = []
        policy = make_policy(name, options)
        if name == "etlru":  # one category with one rate for all requests
            policy.model.categories.refine = lambda names, *_: policy.model.categories.root
            policy.model.categories.root.exponential = Exponential(0.5, 100.0, 0.01)
            policy.model.fit = lambda now: None
        tree = RadixTree(policy, 10, 1, on_evict=cuts.append)
        for time, (conversation, length) in enumerate(requests):
            path = tuple(conversation * 10 + i for i in range(length))
            tree.access(Request(time=float(time), path=path, prompt_tokens=length))
            recount(tree)
        return [cut.blocks for cut in cuts]

    options = {"threshold_tokens": 0.0, "model": "exponential"}
    assert evicted_runs("etlru", options) == evicted_runs("lru", {})
