"""Lemma 1 and Theorem 2 of arXiv 2510.15152 against dynamic programmes that try everything.

The programmes are in benchmark/papers/tail/program.py.
"""

import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

BENCHMARK = str(Path(__file__).resolve().parents[2] / "benchmark" / "papers")
sys.path.insert(0, BENCHMARK)
try:
    from tail import program
finally:
    sys.path.remove(BENCHMARK)

GROWTHS = [{2: 1.0}, {1: 0.5, 2: 0.5}, {0: 0.5, 3: 0.5}]
RATES = st.sampled_from([0.25, 0.5, 1.0, 2.0])


@settings(max_examples=200)
@given(
    talks=st.lists(st.tuples(RATES, st.integers(1, 6), st.integers(0, 6)), min_size=1, max_size=4),
    growth=st.sampled_from(GROWTHS),
    xi=st.integers(0, 6),
    room=st.integers(0, 8),
)
def test_lemma_1_the_greedy_solves_the_one_step_problem(talks, growth, xi, room) -> None:
    rates, history = [t[0] for t in talks], [t[1] for t in talks]
    most = [min(t[1], t[2]) for t in talks]
    kept = program.greedy(rates, history, most, growth, xi, room)
    assert sum(kept) <= room
    assert all(k <= m for k, m in zip(kept, most))
    excess = program.next_turn_excess(rates, history, kept, growth, xi)
    least = program.least_excess(rates, history, most, growth, xi, room)
    assert excess == pytest.approx(least)


@pytest.mark.parametrize("forced", [False, True], ids=["optional", "forced"])
@pytest.mark.parametrize("growth", GROWTHS, ids=str)
@pytest.mark.parametrize("rates", [(1.0, 1.0, 1.0), (2.0, 0.25, 0.5)], ids=str)
def test_theorem_2_no_policy_has_less_expected_excess(rates, growth, forced) -> None:
    for xi in (0, 2):
        model = program.Model(rates, growth, answer=1, xi=xi, room=3, forced=forced)
        least, ours = program.values(model, (0, 1, 2), 3)
        assert ours == pytest.approx(least)
        assert least > 0


def test_the_programme_detects_a_worse_policy() -> None:
    # The oracle is not vacuous: with the beliefs turned round ET-LRU keeps the wrong ones.
    model = program.Model((1.0, 1.0), {2: 1.0}, 1, 0, 3)
    least, _ = program.values(model, (0, 1), 4)
    wrong = program.Model((1.0, 1.0), {2: 1.0}, 1, 0, 3, chosen_by=lambda turns, age: 2.0**age)
    assert program.values(wrong, (0, 1), 4)[0] == pytest.approx(least)
    assert program.values(wrong, (0, 1), 4)[1] > least * 1.01


def test_theorem_2_needs_beliefs_that_keep_their_proportions() -> None:
    # By Bayes' rule silence counts against a busy conversation more than against a slow one, so
    # two conversations can change places without an arrival; the paper's exp(-mu t) cannot do that.
    belief = program.silent_posterior(0.25)
    same = program.Model((1.0, 1.0, 1.0), {2: 1.0}, 1, 1, 3, belief=belief)
    least, ours = program.values(same, (0, 1, 2), 3)
    assert ours == pytest.approx(least)
    mixed = program.Model((1.0, 0.25, 0.5), {2: 1.0}, 1, 1, 3, belief=belief)
    least, ours = program.values(mixed, (0, 1, 2), 3)
    assert ours > least * 1.005
