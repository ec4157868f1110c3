"""Intervals of a P99 that hold what they promise, also where requests share their queue."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_canopy.errors import CanopyError
from sglang_canopy.sim.bootstrap import quantile_interval


def bursts(seed: int, windows: int = 40, each: int = 50) -> tuple[np.ndarray, np.ndarray]:
    """Minutes, each with a level of its own that all its requests share."""
    draw = np.random.default_rng(seed)
    levels = np.repeat(draw.lognormal(sigma=0.5, size=windows), each)
    due = np.repeat(np.arange(windows) * 60.0, each) + draw.uniform(0, 60, windows * each)
    return due, levels * draw.lognormal(sigma=0.3, size=windows * each)


def test_the_interval_holds_the_true_quantile_about_as_often_as_it_says():
    # Of the same process for 50,000 minutes. Drawing single requests holds it far less often.
    truth = np.quantile(bursts(1, 50_000)[1], 0.9)
    held, alone = 0, 0
    for seed in range(60):
        due, values = bursts(100 + seed)
        one = quantile_interval(due, values, 0.9, window_s=60, level=0.9, resamples=200, seed=seed)
        held += one.low <= truth <= one.high
        tiny = quantile_interval(
            np.arange(len(due)), values, 0.9, window_s=1, level=0.9, resamples=200, seed=seed
        )
        alone += tiny.low <= truth <= tiny.high
    assert held >= 0.75 * 60
    assert alone <= 0.6 * 60


@settings(deadline=None, max_examples=40)
@given(
    values=st.lists(st.floats(0, 100), min_size=10, max_size=60),
    quantile=st.sampled_from([0.01, 0.5, 0.9, 0.99]),
    seed=st.integers(0, 9),
)
def test_a_resampled_quantile_is_that_of_the_resampled_requests(values, quantile, seed):
    due, taken = np.arange(len(values)) * 1.0, np.array(values)
    found = quantile_interval(due, taken, quantile, window_s=2, resamples=5, seed=seed)
    count = -(-len(values) // 2)
    expected = []
    for drawn in np.random.default_rng(seed).integers(count, size=(5, count)):
        made = np.concatenate([taken[2 * w : 2 * w + 2] for w in drawn])
        expected.append(np.quantile(made, quantile, method="inverted_cdf"))
    assert found.resampled == pytest.approx(sorted(expected))
    assert found.value == pytest.approx(np.quantile(taken, quantile, method="inverted_cdf"))
    assert found.low <= found.high
    assert found.chance_of_at_most(found.resampled[-1]) == 1.0
    assert found.chance_of_at_most(-1.0) == 0.0


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"window_s": 0.0}, "window_s must be a number above 0"),
        ({"window_s": 1e9}, "longer trace or shorter windows"),
        ({"quantile": 1.0, "window_s": 1.0}, "quantile must be a number between 0 and 1"),
        ({"resamples": 0, "window_s": 1.0}, "resamples must be 1 or more"),
    ],
)
def test_a_mistake_gets_one_line(given, said):
    with pytest.raises(CanopyError, match=said):
        quantile_interval(np.arange(20.0), np.arange(20.0), **given)
    with pytest.raises(CanopyError, match="one time a value"):
        quantile_interval(np.arange(3.0), np.arange(20.0), window_s=1.0)
