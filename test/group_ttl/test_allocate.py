"""Compare the allocator with independent oracles: brute force and a linear program."""

import itertools

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from scipy.optimize import linprog

from canopy_lab.group_ttl.allocate import allocate, budget_price, fixed_ttl_step
from canopy_lab.group_ttl.histogram import GRID_S, Curves, Histograms, count_intervals
from sglang_canopy.errors import CanopyError


def linear_bound(curves: Curves, budget: float) -> float:
    """Hits when each group may mix its TTLs: no allocation of ``budget`` tokens wins more."""
    groups, steps = curves.hits.shape
    solution = linprog(
        -curves.hits.ravel(),
        A_ub=curves.mean_tokens.reshape(1, -1),
        b_ub=[budget],
        A_eq=np.kron(np.eye(groups), np.ones(steps)),
        b_eq=np.ones(groups),
        method="highs",
    )
    assert solution.success, solution.message
    return float(-solution.fun)


def histograms_of(groups: list[list[tuple[float | None, int]]], duration_s: float) -> Histograms:
    """Return histograms of (gap or None, tokens) intervals that start at time 0."""
    rows = [(number, gap, tokens) for number, group in enumerate(groups) for gap, tokens in group]
    group, gaps, tokens = zip(*rows)
    return count_intervals(
        np.array(group),
        np.arange(len(rows)),
        np.array([np.inf if gap is None else gap for gap in gaps]),
        np.full(len(rows), duration_s),
        np.array(tokens),
        len(groups),
        duration_s,
    )


def smallest_grid_ttl(step_s: float) -> float:
    """Return the smallest TTL of the grid that is at least ``step_s``."""
    return float(GRID_S[np.searchsorted(GRID_S, step_s)])


def test_hits_and_bytes_of_one_group_by_hand() -> None:
    counts = histograms_of([[(4.0, 100), (None, 10)]], 100.0)
    curves = counts.exact_curves()
    step_4_s, step_8_s = np.searchsorted(GRID_S, [4.0, 8.0])
    assert curves.hits[0, step_4_s - 1] == 0
    assert curves.hits[0, step_4_s] == curves.hits[0, -1] == 100
    assert curves.mean_tokens[0, step_4_s] == pytest.approx((100 * 4 + 10 * 4) / 100)
    assert curves.mean_tokens[0, step_8_s] == pytest.approx((100 * 4 + 10 * 8) / 100)
    assert curves.mean_tokens[0, -1] == pytest.approx((100 * 4 + 10 * 100) / 100)


def test_an_interval_that_was_cut_off_is_not_one_that_ended() -> None:
    # Half of the pages return after 4 s; the others were observed for 2 s only.
    group = np.zeros(4, dtype=np.int64)
    gaps = np.array([4.0, 4.0, np.inf, np.inf])
    last_gaps_s = np.array([9.0, 9.0, 2.0, 2.0])
    counts = count_intervals(group, np.arange(4), gaps, last_gaps_s, np.full(4, 10), 1, 10.0)
    assert counts.exact_curves().hits[0, -1] == 20
    assert counts.expected_curves().hits[0, -1] == pytest.approx(40)


def test_sparse_groups_shrink_to_the_overall_curve() -> None:
    frequent = [(4.0, 10)] * 50 + [(None, 10)] * 50
    counts = histograms_of([frequent, [(None, 10)]], 100.0)
    unshrunk = counts.expected_curves(0.0).hits[:, -1] / counts.weight
    shrunk = counts.expected_curves(100.0).hits[:, -1] / counts.weight
    assert unshrunk[1] == 0.0
    assert 0.4 < shrunk[1] < 0.5
    assert shrunk[0] == pytest.approx(unshrunk[0], abs=0.02)


def test_bytes_of_an_unused_group_go_to_a_reused_one() -> None:
    reused, unused = [(30.0, 100)] * 10, [(None, 100)] * 10
    curves = histograms_of([reused, unused], 100.0).exact_curves()
    budget = 10 * 100 * 30.0 / 100
    assert fixed_ttl_step(curves, budget) < np.searchsorted(GRID_S, 30.0)
    allocation = allocate(curves, budget * 1.1)
    assert allocation.ttl_s.tolist() == [smallest_grid_ttl(30.0), 0.0]
    assert (allocation.hits, allocation.mean_tokens) == (1000, pytest.approx(budget))


def test_a_budget_for_everything_keeps_all_reused_pages() -> None:
    curves = histograms_of([[(5.0, 1), (50.0, 1)], [(500.0, 1), (None, 9)]], 1000.0).exact_curves()
    allocation = allocate(curves, 1e9)
    assert allocation.hits == 3
    assert allocation.ttl_s.tolist() == [smallest_grid_ttl(50.0), smallest_grid_ttl(500.0)]


@pytest.mark.parametrize("budget", [0.0, -1.0, float("nan"), float("inf")])
def test_a_budget_that_is_not_positive_is_refused(budget: float) -> None:
    with pytest.raises(CanopyError, match="budget must be positive"):
        allocate(histograms_of([[(1.0, 1)]], 1.0).exact_curves(), budget)


GAPS_S = st.one_of(st.none(), st.floats(0.01, 3000.0))
INTERVALS = st.lists(st.tuples(GAPS_S, st.integers(1, 500)), min_size=1, max_size=12)


@st.composite
def problems(draw: st.DrawFn, max_groups: int) -> tuple[Curves, float]:
    groups = draw(st.lists(INTERVALS, min_size=1, max_size=max_groups))
    curves = histograms_of(groups, 4000.0).exact_curves()
    total_tokens = float(curves.mean_tokens[:, -1].sum())
    return curves, total_tokens * draw(st.floats(0.01, 1.2))


@given(problems(max_groups=3))
def test_hits_are_near_brute_force_and_never_below_one_ttl(problem: tuple[Curves, float]) -> None:
    curves, budget = problem
    allocation = allocate(curves, budget)
    assert allocation.mean_tokens <= budget * (1 + 1e-6)
    fixed_step = fixed_ttl_step(curves, budget)
    assert allocation.hits >= curves.hits[:, fixed_step].sum()
    # An optimal solution only uses TTLs at which the hits rise.
    steps = [np.flatnonzero(np.diff(row, prepend=-1.0)) for row in curves.hits]
    best_hits = max(
        sum(curves.hits[group, step] for group, step in enumerate(chosen))
        for chosen in itertools.product(*steps)
        if sum(curves.mean_tokens[group, step] for group, step in enumerate(chosen)) <= budget
    )
    largest = max(np.diff(row, prepend=0.0).max() for row in curves.hits)
    # A solution on the envelope is within one step of the optimum.
    assert allocation.hits >= best_hits - largest - 1e-6


@given(problems(max_groups=8))
def test_hits_are_within_one_step_of_the_linear_bound(problem: tuple[Curves, float]) -> None:
    curves, budget = problem
    bound = linear_bound(curves, budget)
    allocation = allocate(curves, budget)
    assert allocation.hits <= bound * (1 + 1e-6) + 1e-6
    assert allocation.hits >= bound - envelope_steps(curves).max() - 1e-6


@given(problems(max_groups=5))
@settings(max_examples=20)
def test_more_budget_costs_less_a_hit(problem: tuple[Curves, float]) -> None:
    curves, budget = problem
    assume(curves.hits[:, -1].sum() > 0)
    assert budget_price(curves, 2 * budget) <= budget_price(curves, budget) * (1 + 1e-9)


def envelope_steps(curves: Curves) -> np.ndarray:
    """Return the largest step in hits along each group's concave envelope."""
    largest = []
    for hits, cost in zip(curves.hits, curves.mean_tokens):
        start, largest_gain = 0, 0.0
        while hits[start:].max() > hits[start]:
            gain, cost_step = hits[start + 1 :] - hits[start], cost[start + 1 :] - cost[start]
            ratio = np.where(gain > 0, gain / np.maximum(cost_step, 1e-12), -1.0)
            last_best = np.flatnonzero(ratio >= ratio.max() * (1 - 1e-12))[-1]
            largest_gain = max(largest_gain, float(gain[last_best]))
            start += 1 + int(last_best)
        largest.append(largest_gain)
    return np.array(largest)
