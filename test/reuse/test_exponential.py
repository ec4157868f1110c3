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

TALKS = st.lists(
    st.tuples(
        st.sampled_from(["text", "file"]),
        st.floats(0.0, 50.0),
        st.lists(st.floats(0.5, 300.0), max_size=5),
    ),
    min_size=1,
    max_size=12,
)


def log_of(talks):
    """(time, type, conversation, turn) of every request, in order of time."""
    rows = []
    for talk, (kind, start, gaps) in enumerate(talks):
        times = [start]
        for gap in gaps:
            times.append(times[-1] + gap)
        rows += [(t, kind, talk, turn) for turn, t in enumerate(times, 1)]
    return sorted(rows)


def fed(model, rows):
    for time, kind, talk, turn in rows:
        path = [(talk, depth) for depth in range(turn)]
        request = Request(time=time, path=path, category=kind, prompt_tokens=turn)
        model.arrive(request)
        model.finish(request)
    model.fit(rows[-1][0])
    return model


def by_category(rows):
    """Return the gaps to the next use and the lifespans of every type and turn, from the log."""
    last, next_use = {}, {}
    for time, _, talk, turn in rows:
        last[talk] = max(time, last.get(talk, time))
        next_use[talk, turn] = time
    gaps, lives = defaultdict(list), defaultdict(list)
    for time, kind, talk, turn in rows:
        gaps[kind, turn].append(next_use.get((talk, turn + 1), math.inf) - time)
        lives[kind, turn].append(last[talk] - time)
    return gaps, lives


@given(talks=TALKS)
def test_it_is_the_papers_formula_of_the_log(talks):
    rows = log_of(talks)
    model = fed(ReuseModel(exponential=True, type_turn=True, min_samples=1), rows)
    gaps, lives = by_category(rows)
    for (kind, turn), of_all in gaps.items():
        reused = [gap for gap in of_all if gap < math.inf]
        if not reused:
            continue
        count = len(of_all)
        mean = sum(reused) / len(reused)

        def cdf(x, mean=mean, count=count, reused=reused):
            return len(reused) / count * (1.0 - math.exp(-x / mean))

        life = sum(lives[kind, turn]) / len(of_all)
        category = model.categories.get("|".join(type_turn_features(kind, turn)))
        for age in (0.0, 1.0, 30.0, 400.0):
            wanted = cdf(age + life) - cdf(age)
            got = category.exponential.rank(age)
            assert got == pytest.approx(wanted, rel=1e-6, abs=1e-12)


def test_counted_blocks_without_reuse_are_not_expected_again():
    talks = [("text", float(n), [5.0] if n % 2 else []) for n in range(40)]
    counted = fed(ReuseModel(exponential=True, type_turn=True), log_of(talks))
    assert counted.categories.get("text|turn1").exponential.rank(0.0) > 0.0
    assert counted.categories.get("text|turn2").exponential.rank(0.0) == 0.0


def test_before_a_fit_every_probability_is_0():
    assert ReuseModel(exponential=True).categories.root.exponential.rank(3.0) == pytest.approx(0.0)


def test_a_new_label_uses_its_parents_curve_until_the_next_fit():
    talks = [("text", float(n), [5.0, 5.0]) for n in range(30)]
    model = fed(ReuseModel(exponential=True, type_turn=True), log_of(talks))
    known = model.categories.get("text").exponential
    assert known.rank(1.0) > 0.0
    assert model.categories.refine(("text", "turn9")).exponential == known


def leaf(policy, label, last_access, offset=0):
    new_leaf = Leaf(offset, 10)
    new_leaf.category, new_leaf.last_access, new_leaf.created = label, last_access, last_access
    policy.admit(new_leaf, last_access)
    return new_leaf


@pytest.mark.parametrize("categories", ["type-turn", "refined"])
def test_a_tenth_turn_outlives_a_first_of_equal_age_if_it_returns_more(categories):
    """Section 4.1: many one-turn requests must not push a ten-turn one out."""
    # One in four continues after its first turn, for fourteen turns; gaps are equal.
    talks = [("text", float(n), [20.0] * (14 if n % 4 == 0 else 0)) for n in range(200)]
    options = {"model": "exponential", "categories": categories, "min_samples": 5}
    policy = make_policy("wa", options)
    fed(policy.model, log_of(talks))
    first = policy.model.categories.refine(names(categories, 1)).label
    tenth = policy.model.categories.refine(names(categories, 10)).label
    old, young = leaf(policy, tenth, 1000.0), leaf(policy, first, 1005.0)
    assert policy.victim(1010.0).leaf is young
    policy.drop(young)
    assert policy.victim(1010.0).leaf is old


def names(categories, turn):
    if categories == "type-turn":
        return type_turn_features("text", turn)
    return ("text", "-", "turn1" if turn == 1 else "turn5+", "out<64")


def test_equal_probabilities_are_ordered_by_depth_deepest_first():
    policy = make_policy("wa", {"model": "exponential", "min_samples": 1})
    talks = [("a", 0.0, [5.0]), ("b", 0.0, [5.0])]
    fed(policy.model, log_of(talks))
    labels = [f"{kind}|-|turn1|out<64" for kind in "ab"]
    leaf(policy, labels[0], 10.0)
    deep = leaf(policy, labels[1], 10.0, offset=100)
    assert policy.victim(15.0).leaf is deep


def test_a_shared_prefix_belongs_to_its_last_user_in_the_papers_categories():
    policy = make_policy("wa", {"model": "exponential", "categories": "type-turn"})
    policy.model.categories.refine(("text", "turn1"))
    shared = Leaf(0, 10)
    shared.category, shared.last_access, shared.created = "text|turn1", 9.0, 0.0
    shared.hits, shared.turn = 12, 1
    policy.admit(shared, 9.0)
    assert list(policy._cells._cells) == [("text|turn1", 0)]
