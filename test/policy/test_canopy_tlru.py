"""Canopy's TLRU: which tokens are free, its targets, and its learnt prompt growth."""

import pytest

from sglang_canopy.policy.block_tree import RadixTree
from sglang_canopy.policy.registry import make_policy
from sglang_canopy.records import Leaf, Request
from support.tree_recount import recount


def serve(tree, path, time, output_tokens=0, **fields):
    """Serve one request of one-token blocks; return its uncached tokens."""
    tokens = {"prompt_tokens": len(path), "output_tokens": output_tokens}
    return len(path) - tree.access(Request(time=time, path=tuple(path), **tokens, **fields))


def conversation(number, length):
    return [number * 1000 + i for i in range(length)]


def worst_next_turn(policy_name, options):
    """Return the most uncached tokens of a next turn in figure 1 of arXiv 2510.15152."""
    uncached_tokens = []
    for returning_number in (1, 2):
        policy = make_policy(policy_name, options)
        tree = RadixTree(policy, 100, 1)
        if policy_name == "canopy-tlru":  # another conversation shows that a turn adds 100 tokens
            teacher = RadixTree(policy, 10_000, 1)
            serve(teacher, conversation(9, 100), 0.0)
            serve(teacher, conversation(9, 200), 1.0)
            policy.model.fit(1.0)
            for leaf in list(policy.leaves()):
                policy.drop(leaf)
        serve(tree, conversation(1, 100), 2.0)
        serve(tree, conversation(2, 100), 3.0)
        uncached_tokens.append(serve(tree, conversation(returning_number, 200), 4.0))
        recount(tree)
    return max(uncached_tokens)


def test_the_worst_case_of_the_papers_figure_1_is_150_instead_of_200():
    assert worst_next_turn("lru", {}) == 200
    assert worst_next_turn("canopy-tlru", {"threshold_tokens": 150, "caching": "optional"}) == 150


def test_forced_caching_cannot_reach_the_bound():
    assert worst_next_turn("canopy-tlru", {"threshold_tokens": 150}) == 200


def test_evicting_after_the_request_as_in_algorithm_1_gives_150_for_both():
    uncached_tokens = []
    for returning_number in (1, 2):
        options = {"threshold_tokens": 150, "next_prompt_tokens": 100}
        tree = RadixTree(make_policy("canopy-tlru", options), 100, 1, optional_caching=True)
        serve(tree, conversation(1, 100), 2.0)
        serve(tree, conversation(2, 100), 3.0)
        uncached_tokens.append(serve(tree, conversation(returning_number, 200), 4.0))
        recount(tree)
    assert uncached_tokens == [150, 150]


def leaf_of(policy, history, length, offset=0, time=0.0):
    leaf = Leaf(offset, length)
    leaf.history, leaf.last_access = history, time
    policy.admit(leaf, time)
    return leaf


@pytest.mark.parametrize(
    ("threshold_tokens", "leaves", "victim_number", "keep_tokens"),
    [
        # No prompt growth is known yet: 100 + 0 - 60 tokens are needed.
        (60, [(100, 100, 0)], 0, 40),
        # Free tokens of a young leaf are evicted before needed ones of an old leaf.
        (60, [(200, 100, 0), (100, 100, 0)], 1, 40),
        (10, [(200, 100, 0), (200, 100, 0)], 0, 0),  # without free tokens it is LRU
        (60, [(100, 50, 50)], 0, 0),  # a leaf beyond the budget is evicted whole
    ],
)
def test_a_leaf_is_trimmed_at_the_budget(threshold_tokens, leaves, victim_number, keep_tokens):
    policy = make_policy("canopy-tlru", {"threshold_tokens": threshold_tokens})
    admitted = [leaf_of(policy, *leaf, time=float(i)) for i, leaf in enumerate(leaves)]
    assert policy.victim(10.0) == (admitted[victim_number], keep_tokens)


def test_a_fixed_estimate_overrides_observed_growth():
    policy = make_policy("canopy-tlru", {"threshold_tokens": 60, "next_prompt_tokens": 25})
    tree = RadixTree(policy, 10_000, 1)
    serve(tree, conversation(9, 100), 0.0)
    serve(tree, conversation(9, 900), 1.0)  # another conversation grows by 800
    policy.model.fit(1.0)
    for leaf in list(policy.leaves()):
        policy.drop(leaf)
    leaf = leaf_of(policy, history=100, length=100)
    assert policy.victim(2.0) == (leaf, 100 + 25 - 60)


def test_the_target_in_milliseconds_becomes_tokens_through_the_ttft_model():
    policy = make_policy("canopy-tlru", {"ttft_ms": 110.0})
    admitted_leaf = leaf_of(policy, history=100, length=100)
    assert policy.victim(0.0) == (admitted_leaf, 0)  # no model yet: LRU
    request = Request(time=0.0, path=(1,), prompt_tokens=1, ttft_model=(0.001, 0.05))
    request.label = policy.arrive(request)
    policy.finish(request)
    assert policy.target.threshold_tokens == pytest.approx(60.0)
    assert policy.victim(0.0) == (admitted_leaf, 40)
    policy.drop(admitted_leaf)
    leaf = leaf_of(policy, history=100, length=100)
    assert policy.victim(0.0) == (leaf, 40)
    policy.drop(leaf)
    leaf = Leaf(0, 100)
    leaf.history, leaf.slo_ms = 100, 80.0  # a request's own target overrides the policy's
    policy.admit(leaf, 0.0)
    assert policy.victim(0.0) == (leaf, 70)


def test_an_observed_percentile_sets_the_threshold():
    policy = make_policy("canopy-tlru", {"ttft_percentile": 50.0})
    for length in (10, 20, 30, 40, 50):
        request = Request(time=0.0, path=(length,), prompt_tokens=length, cached_tokens=0)
        request.label = policy.arrive(request)
        policy.finish(request)
    assert policy.target.threshold_tokens == 30.0


def test_planned_growth_is_that_of_the_leafs_own_category():
    policy = make_policy("canopy-tlru", {"threshold_tokens": 50})
    tree = RadixTree(policy, 100_000, 1)
    for number in range(1, 41):
        category, added_tokens = ("long", 90) if number % 2 else ("short", 10)
        serve(tree, conversation(number, 100), 10.0 * number, category=category)
        serve(tree, conversation(number, 100 + added_tokens), 10.0 * number + 1, category=category)
    policy.model.fit(500.0)
    long_label, short_label = (f"{category}|-|turn1|out<64" for category in ("long", "short"))
    assert policy.next_tokens(long_label) == 90
    assert policy.next_tokens(short_label) == 10


def serve_turns(policy, time, turns):
    """Let the policy learn from one conversation whose prompt grows by 10 tokens a turn."""
    for turn in range(turns):
        path = [f"{time}-{i}" for i in range(10 * (turn + 1))]
        request = Request(time=time + turn, path=path, prompt_tokens=len(path))
        request.label = policy.arrive(request)
        request.label = policy.finish(request)


def test_growth_is_planned_for_before_the_first_fit():
    policy = make_policy("canopy-tlru", {"threshold_tokens": 5})
    serve_turns(policy, 0.0, 6)
    assert policy.model.version == 0
    assert policy.next_tokens("default") == 10.0


def test_admitted_leaves_are_planned_again_after_the_first_fits():
    policy = make_policy("canopy-tlru", {"threshold_tokens": 5})
    leaf = Leaf(0, 100)
    leaf.history = 100
    policy.admit(leaf, 0.0)
    assert policy.victim(1.0) == (leaf, 95)
    serve_turns(policy, 10.0, 30)
    assert policy.model.version >= 1
    assert policy.victim(100.0) == (leaf, 0)  # all of it is needed
