"""The recommendation, including the one to change nothing, and its bootstrap interval."""

import numpy as np
import pytest

from canopy_lab.advise.bootstrap import bootstrap
from canopy_lab.advise.decide import Gain, decide

SIZE = {"capacity": "1,000 tokens"}


def gain(label: str, points: float, low: float, high: float) -> Gain:
    return Gain(label, label, 0.2 + points / 100, points, low, high)


def test_the_best_certain_gain_is_recommended_with_its_interval():
    decision = decide(0.2, 0.6, 0.5, [gain("canopy-lru", 1, 0.6, 1.4), gain("wa", 4, 3, 5)], **SIZE)
    assert decision.flag == "wa"
    assert "24.0 % of the prompt tokens instead of the 20.0 %" in decision.sentence
    assert "(95 % interval 3.0 to 5.0)" in decision.sentence


def test_the_simpler_policy_wins_if_the_best_is_barely_better():
    decision = decide(0.2, 0.6, 0.5, [gain("canopy-lru", 4, 3, 5), gain("wa", 4.3, 3, 5)], **SIZE)
    assert decision.flag == "canopy-lru"


@pytest.mark.parametrize(
    ("baseline", "repeats", "bound", "points", "reason"),
    [
        (0.0, 0.004, 0.004, 0.1, "only 0.4 % of the prompt tokens repeat"),
        (0.595, 0.6, 0.6, 0.4, "already hits 59.5 %"),
        (0.2, 0.6, 0.205, 0.4, "even a policy that knew the future would hit only 20.5 %"),
        (0.2, 0.6, 0.5, 0.3, "too little to act on"),
    ],
)
def test_the_reason_to_keep_lru_is_stated(baseline, repeats, bound, points, reason):
    decision = decide(baseline, repeats, bound, [gain("wa", points, -0.5, 1)], **SIZE)
    assert decision.flag == "lru"
    assert decision.gain is None
    assert decision.sentence.startswith("Keep LRU: ")
    assert reason in decision.sentence


def test_an_uncertain_gain_is_not_recommended():
    decision = decide(0.2, 0.6, 0.5, [gain("wa", 3, -0.1, 6)], **SIZE, memory=" A disk adds 9.")
    assert decision.flag == "lru"
    assert decision.sentence.endswith("too little to act on. A disk adds 9.")


def test_the_interval_has_zero_if_nothing_is_gained_and_lies_above_it_otherwise() -> None:
    rng = np.random.default_rng(1)
    tokens = np.full(4000, 100)
    cluster_numbers = np.arange(4000) // 10
    changes = rng.choice((-20, 20), 4000)
    mean_points, low, high = bootstrap(changes, tokens, cluster_numbers, rng)
    assert low < 0 < high
    mean_points, low, high = bootstrap(changes + 5, tokens, cluster_numbers, rng)
    assert low < mean_points < high
    assert mean_points == pytest.approx(5.0, abs=1.0)
    assert low > 0


def test_a_single_cluster_gives_a_degenerate_interval() -> None:
    arrays = np.array([[5, 5], [10, 10], [0, 0]])
    mean_points, low, high = bootstrap(*arrays, np.random.default_rng(0))
    assert mean_points == low == high == 50.0
