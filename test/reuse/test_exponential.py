"""The ATC 2025 paper's ReuseProb_w(t, life), against the formula evaluated from a log of requests."""

import math
from collections import defaultdict

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


def log_rows(conversations):
    """Return (time, type, conversation, turn) of every request, in order of time."""
    rows = []
    for conversation, (kind, start, gaps) in enumerate(conversations):
        times = [start]
        for gap in gaps:
            times.append(times[-1] + gap)
        rows += [(t, kind, conversation, turn) for turn, t in enumerate(times, 1)]
    return sorted(rows)


def train(model, rows):
    for time, kind, conversation, turn in rows:
        path = [(conversation, depth) for depth in range(turn)]
        request = Request(time=time, path=path, category=kind, prompt_tokens=turn)
        model.arrive(request)
        model.finish(request)
    model.fit(rows[-1][0])
    return model


def gaps_and_lives(rows):
    """Return the gaps to the next use and the lifespans of every type and turn, from the log."""
    last_use, next_use = {}, {}
    for time, _, conversation, turn in rows:
        last_use[conversation] = max(time, last_use.get(conversation, time))
        next_use[conversation, turn] = time
    gaps, lives = defaultdict(list), defaultdict(list)
    for time, kind, conversation, turn in rows:
        gaps[kind, turn].append(next_use.get((conversation, turn + 1), math.inf) - time)
        lives[kind, turn].append(last_use[conversation] - time)
    return gaps, lives


@given(conversations=CONVERSATIONS)
def test_the_rank_is_the_papers_formula_of_the_log(conversations):
    rows = log_rows(conversations)
    model = train(ReuseModel(exponential=True, type_turn=True, min_samples=1), rows)
    gaps, lives = gaps_and_lives(rows)
    for (kind, turn), category_gaps in gaps.items():
        reused = [gap for gap in category_gaps if gap < math.inf]
        if not reused:
            continue
        count = len(category_gaps)
        mean = sum(reused) / len(reused)

        def cdf(x, mean=mean, count=count, reused=reused):
            return len(reused) / count * (1.0 - math.exp(-x / mean))

        mean_life = sum(lives[kind, turn]) / len(category_gaps)
        category = model.categories.get("|".join(type_turn_features(kind, turn)))
        for age in (0.0, 1.0, 30.0, 400.0):
            expected = cdf(age + mean_life) - cdf(age)
            rank = category.exponential.rank(age)
            assert rank == pytest.approx(expected, rel=1e-6, abs=1e-12)


def test_a_turn_that_was_never_reused_has_rank_0():
    conversations = [("text", float(n), [5.0] if n % 2 else []) for n in range(40)]
    model = train(ReuseModel(exponential=True, type_turn=True), log_rows(conversations))
    assert model.categories.get("text|turn1").exponential.rank(0.0) > 0.0
    assert model.categories.get("text|turn2").exponential.rank(0.0) == 0.0


def test_before_a_fit_the_rank_is_0():
    assert ReuseModel(exponential=True).categories.root.exponential.rank(3.0) == pytest.approx(0.0)


def test_a_new_label_uses_its_parents_curve_until_the_next_fit():
    conversations = [("text", float(n), [5.0, 5.0]) for n in range(30)]
    model = train(ReuseModel(exponential=True, type_turn=True), log_rows(conversations))
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
    """Section 4.1: many one-turn requests must not push a ten-turn one out."""
    # One in four continues after its first turn, for fourteen turns; gaps are equal.
    conversations = [("text", float(n), [20.0] * (14 if n % 4 == 0 else 0)) for n in range(200)]
    options = {"model": "exponential", "categories": categories, "min_samples": 5}
    policy = make_policy("wa", options)
    train(policy.model, log_rows(conversations))
    first = policy.model.categories.refine(features(categories, 1)).label
    tenth = policy.model.categories.refine(features(categories, 10)).label
    old, young = admit_leaf(policy, tenth, 1000.0), admit_leaf(policy, first, 1005.0)
    assert policy.victim(1010.0).leaf is young
    policy.drop(young)
    assert policy.victim(1010.0).leaf is old


def features(categories, turn):
    if categories == "type-turn":
        return type_turn_features("text", turn)
    return ("text", "-", "turn1" if turn == 1 else "turn5+", "out<64")


def test_equal_probabilities_are_ordered_by_depth_deepest_first():
    policy = make_policy("wa", {"model": "exponential", "min_samples": 1})
    conversations = [("a", 0.0, [5.0]), ("b", 0.0, [5.0])]
    train(policy.model, log_rows(conversations))
    labels = [f"{kind}|-|turn1|out<64" for kind in "ab"]
    admit_leaf(policy, labels[0], 10.0)
    deep = admit_leaf(policy, labels[1], 10.0, offset=100)
    assert policy.victim(15.0).leaf is deep


def test_a_shared_prefix_belongs_to_its_last_user_in_the_papers_categories():
    policy = make_policy("wa", {"model": "exponential", "categories": "type-turn"})
    policy.model.categories.refine(("text", "turn1"))
    shared = Leaf(0, 10)
    shared.category, shared.last_access, shared.created = "text|turn1", 9.0, 0.0
    shared.hits, shared.turn = 12, 1
    policy.admit(shared, 9.0)
    assert list(policy._cells._cells) == [("text|turn1", 0)]
