"""The interval of a gain."""

import numpy as np
import pytest

from canopy_lab.advise.bootstrap import bootstrap


def test_the_bootstrap_covers_nothing_gained_and_sees_something_gained() -> None:
    rng = np.random.default_rng(1)
    tokens = np.full(4000, 100)
    cluster = np.arange(4000) // 10
    noise = rng.choice((-20, 20), 4000)
    point, low, high = bootstrap(noise, tokens, cluster, rng)
    assert low < 0 < high
    point, low, high = bootstrap(noise + 5, tokens, cluster, rng)
    assert low < point < high
    assert point == pytest.approx(5.0, abs=1.0)
    assert low > 0


def test_a_single_cluster_gives_a_degenerate_interval() -> None:
    point, low, high = bootstrap(
        np.array([5, 5]), np.array([10, 10]), np.array([0, 0]), np.random.default_rng(0)
    )
    assert point == low == high == 50.0
