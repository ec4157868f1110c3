"""WA: the order of victims, hints, twins and forgotten categories."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_canopy.policy.block_tree import RadixTree, TreeCut
from sglang_canopy.policy.registry import make_policy
from sglang_canopy.records import Leaf, Request
from sglang_canopy.reuse.survival import AGE_BINS
from support.tree_recount import recount


def leaf_of(policy, label, time, *, offset=0, hits=1, turn=1, now=None, **fields):
    leaf = Leaf(offset, 10)
    leaf.category, leaf.last_access, leaf.created = label, time, time
    leaf.hits, leaf.turn = hits, turn
    for name, value in fields.items():
        setattr(leaf, name, value)
    policy.admit(leaf, time if now is None else now)
    return leaf


def policy_with(ranks, **options):
    """Return a policy whose categories have ``ranks``: label -> ranks of the first age bins."""
    policy = make_policy("wa", options)
    for label, first_ranks in ranks.items():
        category = policy.model.categories.refine(tuple(label.split("|")))
        later_ranks = [first_ranks[-1]] * (AGE_BINS - len(first_ranks))
        category.rank = [*map(float, first_ranks), *map(float, later_ranks)]
    return policy


def test_by_default_a_conversations_own_gaps_refine_its_category():
    def label(**options):
        policy = make_policy("wa", options)
        for turn, time in enumerate((0.0, 1.0, 2.0)):
            request = Request(time, "chat", tuple(range(turn + 1)), 10, 10 * (turn + 1))
            policy.arrive(request)
            request.stop = "tool"
            label = policy.finish(request)
        return label

    assert label() == label(own_gaps=True) != label(own_gaps=False)


@pytest.mark.parametrize(
    ("ranks", "leaves", "now"),
    [
        # The category that returns less, though it is younger; the youngest if ranks rise with age.
        ({"stays": [5], "leaves": [1]}, [("leaves", 9.0, {}), ("stays", 0.0, {})], 10.0),
        ({"rises": [1, 1, 1, 9]}, [("rises", 10.0, {}), ("rises", 0.0, {})], 10.0),
        # 12 uses in one turn belong to several conversations.
        (
            {"mine": [1], "shared prefix|every<1s|uses9-16": [7]},
            [("mine", 9.0, {"hits": 12, "turn": 12}), ("mine", 9.0, {"hits": 12, "turn": 1})],
            10.0,
        ),
        ({}, [("no such label", 0.0, {})], 1.0),
        ({"k": [1]}, [("k", 9.0, {"over": True}), ("k", 0.0, {})], 10.0),
        ({"k": [9]}, [("k", 0.0, {"return_at": 90.0}), ("k", 0.0, {"return_at": 20.0})], 1.0),
        # Two returns that are overdue within their slack of 500 s and by more than 5 s.
        (
            {"k": [1]},
            [
                ("k", 999.0, {"return_at": 1001.0, "now": 999.0}),
                ("k", 0.0, {"return_at": 1000.0}),
                ("k", 1000.0, {"now": 1000.0}),
            ],
            1006.5,
        ),
        ({"k": [1]}, [("k", 5.0, {"keep_until": 50.0}), ("k", 0.0, {"keep_until": 90.0})], 10.0),
    ],
)
@pytest.mark.parametrize("is_reversed", [False, True])
def test_the_first_listed_leaf_is_the_victim(ranks, leaves, now, is_reversed):
    policy = policy_with(ranks)
    order = sorted(enumerate(leaves), reverse=is_reversed)
    leaf_at = {i: leaf_of(policy, label, time, **fields) for i, (label, time, fields) in order}
    assert policy.victim(now) == (leaf_at[0], 0)


@pytest.mark.parametrize("tenant", [None, "untrusted"])
@pytest.mark.parametrize("is_hinted_first", [False, True])
def test_over_is_ignored_after_too_many_wrong_hints_of_its_tenant(tenant, is_hinted_first):
    policy = policy_with({"k": [1]})
    if is_hinted_first:
        leaf_of(policy, "k", 9.0, over=True, tenant=tenant)
    record = policy.model.hints.record(tenant)
    record.over_hints, record.wrong_over_hints = 20, 10
    older = leaf_of(policy, "k", 0.0)
    if not is_hinted_first:
        leaf_of(policy, "k", 9.0, over=True, tenant=tenant)
    assert policy.victim(10.0).leaf is older


def test_a_known_return_competes_with_the_curves():
    # No hint was checked yet: skill 0.6, so 0.6 / 100 s + 0.4 x 0.001 against 0.01 and 0.001 a second.
    for rank, is_victim in ((0.01, True), (0.001, False)):
        policy = policy_with({"k": [rank], "hinted": [0.001]})
        leaf_of(policy, "k", 0.0)
        hinted = leaf_of(policy, "hinted", 0.0, return_at=100.0)
        assert (policy.victim(0.0).leaf is hinted) is is_victim


def test_a_leaf_to_keep_is_spared_until_its_time_and_no_longer():
    policy = policy_with({"k": [1]})
    spared = leaf_of(policy, "k", 0.0, keep_until=50.0)
    unkept = leaf_of(policy, "k", 5.0)
    assert policy.victim(10.0).leaf is unkept
    assert policy.victim(50.0).leaf is spared


def test_a_hint_acts_on_a_leaf_that_is_admitted_again():
    policy = policy_with({"k": [1]})
    older, younger = leaf_of(policy, "k", 0.0), leaf_of(policy, "k", 5.0)
    assert policy.victim(10.0).leaf is older
    policy.drop(younger)
    younger.over = True
    policy.admit(younger, 10.0)
    assert policy.victim(10.0).leaf is younger


def test_dropping_an_unknown_leaf_is_ignored():
    policy = make_policy("wa")
    policy.drop(Leaf())
    assert policy.victim(0.0) is None


def test_a_twin_ranks_by_the_same_curves_and_learns_nothing_itself():
    policy = policy_with({"stays": [5], "leaves": [1]})
    twin = policy.twin()
    leaf_of(twin, "stays", 0.0)
    victim = leaf_of(twin, "leaves", 9.0)
    assert twin.victim(10.0).leaf is victim
    blocks_before = len(policy.model.shadow)
    twin.arrive(Request(time=11.0, path=(1, 2), prompt_tokens=2))
    assert len(policy.model.shadow) == blocks_before


def evict_with(policy, requests, capacity_blocks=12):
    cuts: list[TreeCut] = []
    tree = RadixTree(policy, capacity_blocks, 1, on_evict=cuts.append)
    time = 0.0
    for number, (pause_s, conversation, length, hint) in enumerate(requests):
        time += pause_s
        path = tuple(conversation * 100 + i for i in range(length))
        category = f"c{conversation % 2}"
        request = Request(time=time, path=path, prompt_tokens=length, category=category)
        request.over = hint == "over"
        request.return_in_s = 3.0 if hint == "return" else None
        request.keep_until = time + 5.0 if hint == "keep" else None
        tree.access(request)
        if number % 5 == 0:
            recount(tree)
    return cuts


HINTS = st.sampled_from(["", "", "", "over", "return", "keep"])
REQUESTS = st.lists(
    st.tuples(st.integers(0, 3), st.integers(0, 6), st.integers(1, 9), HINTS), max_size=60
)
"""(seconds since the request before, conversation, tokens, hint) of each request."""


@given(
    REQUESTS,
    st.sampled_from(["survival", "exponential"]),
    st.sampled_from(["refined", "type-turn"]),
)
def test_two_caches_with_equal_requests_evict_the_same_leaves(requests, model, categories):
    options = {"min_samples": 3, "model": model, "categories": categories}
    cuts = evict_with(make_policy("wa", options), requests)
    assert evict_with(make_policy("wa", options), requests) == cuts


def test_returns_rank_by_the_accuracy_of_their_tenants_hints():
    policy = policy_with({"k": [0.001]})
    accurate_record = policy.model.hints.record("sure")
    accurate_record.return_hints, accurate_record.true_return_hints = 1000, 1000
    inaccurate_record = policy.model.hints.record("half")
    inaccurate_record.return_hints, inaccurate_record.true_return_hints = 1000, 510
    leaf_of(policy, "k", 0.0, return_at=100.0, tenant="sure")
    inaccurate = leaf_of(policy, "k", 0.0, return_at=80.0, tenant="half")
    assert policy.victim(1.0).leaf is inaccurate


def test_leaves_of_a_forgotten_label_rank_by_the_coarser_label():
    policy = policy_with({"k": [9], "k|x": [1], "z": [5]})
    refined_leaf = leaf_of(policy, "k|x", 0.0)
    coarse_leaf = leaf_of(policy, "z", 0.0)
    assert policy.victim(1.0).leaf is refined_leaf
    categories = policy.model.categories
    categories.forget(categories.get("k|x"))
    policy.model.version += 1
    assert policy.victim(1.0).leaf is coarse_leaf
