"""The ATC 2025 paper's ReuseProb_w(t, life), against the formula evaluated from a log of requests."""

import math
from collections import defaultdict
from itertools import accumulate
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_canopy.policy.registry import make_policy
from sglang_canopy.records import Leaf, Request
from sglang_canopy.reuse.categories import type_turn_features
from sglang_canopy.reuse.learner import ReuseModel

CONVERSATIONS = st.lists(
    st.tuples(
        st.sampled_from(["text", "file"]),
        st.floats(0.0, 50.0),
        st.lists(st.floats(0.5, 300.0), max_size=5),
    ),
    min_size=1,
    max_size=12,
)


class LoggedRequest(NamedTuple):
    """A request of a log."""

    time: float
    category: str
    conversation: int
    turn: int


def logged_requests(conversations):
    """Return every request, in order of time."""
    requests = []
    for conversation, (category, start_s, gaps_s) in enumerate(conversations):
        for turn, time in enumerate(accumulate([start_s, *gaps_s]), 1):
            requests.append(LoggedRequest(time, category, conversation, turn))
    return sorted(requests)


def train(model, requests):
    for logged in requests:
        path = [(logged.conversation, depth) for depth in range(logged.turn)]
        request = Request(logged.time, logged.category, path, prompt_tokens=logged.turn)
        model.arrive(request)
        model.finish(request)
    model.fit(requests[-1].time)
    return model


def gaps_and_lives(requests):
    """Return the gaps to the next use and the lifespans of every type and turn, from the log."""
    last_use, next_use = {}, {}
    for logged in requests:
        last_use[logged.conversation] = logged.time
        next_use[logged.conversation, logged.turn] = logged.time
    gaps_s, lives_s = defaultdict(list), defaultdict(list)
    for logged in requests:
        next_time = next_use.get((logged.conversation, logged.turn + 1), math.inf)
        gaps_s[logged.category, logged.turn].append(next_time - logged.time)
        lives_s[logged.category, logged.turn].append(last_use[logged.conversation] - logged.time)
    return gaps_s, lives_s


@given(conversations=CONVERSATIONS)
def test_the_rank_is_the_papers_formula_of_the_log(conversations):
    requests = logged_requests(conversations)
    model = train(ReuseModel(fits_exponential=True, uses_type_turn=True, min_samples=1), requests)
    gaps_s, lives_s = gaps_and_lives(requests)
    for (name, turn), all_gaps_s in gaps_s.items():
        reuse_gaps_s = [gap_s for gap_s in all_gaps_s if gap_s < math.inf]
        if not reuse_gaps_s:
            continue
        reuse_probability = len(reuse_gaps_s) / len(all_gaps_s)
        mean_gap_s = sum(reuse_gaps_s) / len(reuse_gaps_s)

        def cdf(age_s, probability=reuse_probability, mean_s=mean_gap_s):
            return probability * (1.0 - math.exp(-age_s / mean_s))

        mean_life_s = sum(lives_s[name, turn]) / len(all_gaps_s)
        category = model.categories.get("|".join(type_turn_features(name, turn)))
        for age_s in (0.0, 1.0, 30.0, 400.0):
            expected = cdf(age_s + mean_life_s) - cdf(age_s)
            assert category.exponential.rank(age_s) == pytest.approx(expected, rel=1e-6, abs=1e-12)


def test_a_turn_that_was_never_reused_has_rank_0():
    conversations = [("text", float(number), [5.0] if number % 2 else []) for number in range(40)]
    model = train(
        ReuseModel(fits_exponential=True, uses_type_turn=True), logged_requests(conversations)
    )
    assert model.categories.get("text|turn1").exponential.rank(0.0) > 0.0
    assert model.categories.get("text|turn2").exponential.rank(0.0) == 0.0


def test_before_a_fit_the_rank_is_0():
    assert ReuseModel(fits_exponential=True).categories.root.exponential.rank(3.0) == 0.0


def test_a_new_label_uses_its_parents_curve_until_the_next_fit():
    conversations = [("text", float(number), [5.0, 5.0]) for number in range(30)]
    model = train(
        ReuseModel(fits_exponential=True, uses_type_turn=True), logged_requests(conversations)
    )
    parent = model.categories.get("text").exponential
    assert parent.rank(1.0) > 0.0
    assert model.categories.refine(("text", "turn9")).exponential == parent


def admit_leaf(policy, label, last_access, offset=0):
    new_leaf = Leaf(offset, 10)
    new_leaf.category, new_leaf.last_access, new_leaf.created = label, last_access, last_access
    policy.admit(new_leaf, last_access)
    return new_leaf


@pytest.mark.parametrize("categories", ["type-turn", "refined"])
def test_a_tenth_turn_outlives_a_first_of_equal_age_if_it_returns_more(categories):
    """Section 4.1: many one-turn requests must not evict a ten-turn one."""
    # One in four continues after its first turn, for fourteen turns; gaps are equal.
    gap_counts = [14 if number % 4 == 0 else 0 for number in range(200)]
    conversations = [("text", float(i), [20.0] * count) for i, count in enumerate(gap_counts)]
    policy = make_policy("wa", {"model": "exponential", "categories": categories, "min_samples": 5})
    train(policy.model, logged_requests(conversations))
    first_turn = policy.model.categories.refine(features(categories, 1)).label
    tenth_turn = policy.model.categories.refine(features(categories, 10)).label
    older = admit_leaf(policy, tenth_turn, 1000.0)
    newer = admit_leaf(policy, first_turn, 1005.0)
    assert policy.victim(1010.0).leaf is newer
    policy.drop(newer)
    assert policy.victim(1010.0).leaf is older


def features(categories, turn):
    if categories == "type-turn":
        return type_turn_features("text", turn)
    return ("text", "-", "turn1" if turn == 1 else "turn5+", "out<64")


def test_equal_probabilities_are_ordered_by_depth_deepest_first():
    policy = make_policy("wa", {"model": "exponential", "min_samples": 1})
    train(policy.model, logged_requests([("a", 0.0, [5.0]), ("b", 0.0, [5.0])]))
    labels = [f"{category}|-|turn1|out<64" for category in "ab"]
    admit_leaf(policy, labels[0], 10.0)
    deep_leaf = admit_leaf(policy, labels[1], 10.0, offset=100)
    assert policy.victim(15.0).leaf is deep_leaf


def test_a_shared_prefix_belongs_to_its_last_user_in_the_papers_categories():
    policy = make_policy("wa", {"model": "exponential", "categories": "type-turn"})
    policy.model.categories.refine(("text", "turn1"))
    prefix = Leaf(0, 10)
    prefix.category, prefix.last_access, prefix.created = "text|turn1", 9.0, 0.0
    prefix.hits, prefix.turn = 12, 1
    policy.admit(prefix, 9.0)
    assert list(policy._cells._cells) == [("text|turn1", 0)]
