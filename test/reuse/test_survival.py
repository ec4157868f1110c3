from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_canopy.reuse.survival import (
    BINS,
    EDGES,
    age_bin,
    gittins_rank,
    survival_curve,
    token_bin,
)


def counts(**by_bin):
    histogram = [0.0] * BINS
    for name, value in by_bin.items():
        histogram[int(name[1:])] = float(value)
    return histogram


def test_bins_are_the_square_root_of_two_apart():
    assert age_bin(-1.0) == age_bin(0.0) == 0
    assert age_bin(0.25) == 1
    assert EDGES[3] == 2 * EDGES[1]
    assert age_bin(1e12) == BINS - 1
    assert token_bin(0) == 0
    assert token_bin(16) == 1


def test_survival_by_hand():
    # 10 tips: 4 continued in bin 2; 2 waiting in bin 3 count half there, and 3 continue then.
    curve = survival_curve(counts(_2=4, _3=3, _5=1), counts(_3=2))
    assert curve[2] == 1.0
    assert curve[3] == pytest.approx(0.6)
    assert curve[4] == pytest.approx(0.6 * (1 - 3 / 5))
    assert curve[6] == 0.0


def test_a_sparse_category_shrinks_to_the_coarser_curve():
    prior = survival_curve(counts(_4=50), counts(_9=50))
    with_few = survival_curve(counts(), counts(_9=2), prior, 10.0)
    with_many = survival_curve(counts(), counts(_9=2000), prior, 10.0)
    assert with_few[5] == pytest.approx(1 - 5 / 12)
    assert with_many[5] > 0.99


@given(st.lists(st.floats(0.0, 1.0), min_size=BINS - 1, max_size=BINS - 1))
def test_the_rank_equals_its_definition(steps):
    curve = [1.0]
    for step in steps:
        curve.append(curve[-1] * step)
    rank = gittins_rank(curve)
    mean_time = [0.0]
    for i in range(BINS - 1):
        mean_time.append(mean_time[-1] + (curve[i] + curve[i + 1]) / 2 * (EDGES[i + 1] - EDGES[i]))
    for i in range(BINS):
        best_rate = max(
            (
                (curve[i] - curve[j]) / (mean_time[j] - mean_time[i])
                for j in range(i + 1, BINS)
                if mean_time[j] > mean_time[i]
            ),
            default=0.0,
        )
        assert rank[i] == pytest.approx(best_rate, rel=1e-6, abs=1e-12)


@given(
    st.lists(st.integers(0, 20), min_size=BINS, max_size=BINS),
    st.lists(st.integers(0, 20), min_size=BINS, max_size=BINS),
)
def test_curves_fall_from_one_and_stay_probabilities(events, waiting):
    curve = survival_curve([float(n) for n in events], [float(n) for n in waiting])
    assert curve[0] == 1.0
    assert all(a >= b >= 0.0 for a, b in pairwise(curve))
