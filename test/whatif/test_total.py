"""Totals over several replicas, and their sentence."""

import pytest

from sglang_canopy.whatif.meter import LRU, NOW
from sglang_canopy.whatif.total import added_up, in_words


def stats(hit, sampled, wa):
    arm = {"capacity": NOW, "tokens": 100, "sampled_hit_ratio": 0.5}
    arm |= {"standard_error": 0.02, "sampling_error": 0.01}
    return {
        "running": LRU,
        "hit_ratio": hit,
        "arms": [
            {**arm, "policy": LRU, "hit_ratio": hit, "running": True},
            {**arm, "policy": "wa", "hit_ratio": wa, "running": False},
        ],
        "one_block_in": 4,
        "too_small": [],
        "sampled_requests": sampled,
        "requests": {
            "counted": sampled,
            "counted_since_exchange": sampled,
            "needed": 200,
            "uncounted": {"shorter than a block": 2, "without a sampled block": 0},
        },
        "spent_s": 0.5,
        "undecided": None if sampled else "too few requests: 0 of 200",
        "floor": {"policy": LRU, "behind": False, "falls": 0},
    }


def test_replicas_are_weighted_by_their_samples():
    total = added_up([stats(0.4, 300, 0.5), stats(0.8, 100, 0.9), stats(0.0, 0, 0.0)])
    assert total["hit_ratio"] == pytest.approx(0.5)
    assert [arm["hit_ratio"] for arm in total["arms"]] == pytest.approx([0.5, 0.6])
    assert total["arms"][0]["tokens"] == 300
    assert total["undecided"] is None
    assert in_words(total) == "canopy-lru hits 50.0 %, wa would hit 60.0 ± 4.0 %"
    assert added_up([]) is None
    assert added_up([stats(0.0, 0, 0.0)])["hit_ratio"] == 0.0


def test_the_thread_time_of_a_total_is_rounded():
    small = {**stats(0.4, 300, 0.5), "spent_s": 0.123449}
    assert added_up([small])["spent_s"] == 0.1234
