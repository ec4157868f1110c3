"""Survival curves of reuse, and the Gittins rank that they give."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_canopy.reuse.survival import (
    AGE_BINS,
    AGE_EDGES_S,
    age_bin,
    gittins_rank,
    survival_curve,
    token_bin,
)


def histogram_of(**count_by_bin):
    """Return counts by bin: ``_2=4`` is 4 in bin 2."""
    histogram = [0.0] * AGE_BINS
    for name, count in count_by_bin.items():
        histogram[int(name[1:])] = float(count)
    return histogram


def test_bins_are_the_square_root_of_two_apart():
    assert age_bin(-1.0) == age_bin(0.0) == 0
    assert age_bin(0.25) == 1
    assert AGE_EDGES_S[3] == 2 * AGE_EDGES_S[1]
    assert age_bin(1e12) == AGE_BINS - 1
    assert token_bin(0) == 0
    assert token_bin(16) == 1


def test_a_curve_equals_one_computed_by_hand():
    # 10 tips: 4 continued in bin 2; 2 waiting in bin 3 count half there, and 3 continue then.
    curve = survival_curve(histogram_of(_2=4, _3=3, _5=1), histogram_of(_3=2))
    assert curve[2] == 1.0
    assert curve[3] == pytest.approx(0.6)
    assert curve[4] == pytest.approx(0.6 * (1 - 3 / 5))
    assert curve[6] == 0.0


def test_a_sparse_category_shrinks_to_the_coarser_curve():
    prior = survival_curve(histogram_of(_4=50), histogram_of(_9=50))
    few_tips = survival_curve(histogram_of(), histogram_of(_9=2), prior, 10.0)
    many_tips = survival_curve(histogram_of(), histogram_of(_9=2000), prior, 10.0)
    assert few_tips[5] == pytest.approx(1 - 5 / 12)
    assert many_tips[5] > 0.99


@given(st.lists(st.floats(0.0, 1.0), min_size=AGE_BINS - 1, max_size=AGE_BINS - 1))
def test_the_rank_equals_its_definition(survival_ratios):
    curve = [1.0]
    for ratio in survival_ratios:
        curve.append(curve[-1] * ratio)
    rank = gittins_rank(curve)
    mean_time_s = [0.0]
    for i in range(AGE_BINS - 1):
        bin_s = AGE_EDGES_S[i + 1] - AGE_EDGES_S[i]
        mean_time_s.append(mean_time_s[-1] + (curve[i] + curve[i + 1]) / 2 * bin_s)
    for i in range(AGE_BINS):
        best_rate = max(
            (
                (curve[i] - curve[j]) / (mean_time_s[j] - mean_time_s[i])
                for j in range(i + 1, AGE_BINS)
                if mean_time_s[j] > mean_time_s[i]
            ),
            default=0.0,
        )
        assert rank[i] == pytest.approx(best_rate, rel=1e-6, abs=1e-12)


@given(
    st.lists(st.integers(0, 20), min_size=AGE_BINS, max_size=AGE_BINS),
    st.lists(st.integers(0, 20), min_size=AGE_BINS, max_size=AGE_BINS),
)
def test_curves_fall_from_one_and_stay_probabilities(events, waiting):
    curve = survival_curve([*map(float, events)], [*map(float, waiting)])
    assert curve[0] == 1.0
    assert all(earlier >= later >= 0.0 for earlier, later in pairwise(curve))
