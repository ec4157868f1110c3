"""Sums of a sample against the sums over all, fading, the stated error, and totals of replicas."""

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_canopy.whatif.estimator import HitRatioEstimator
from sglang_canopy.whatif.meter import LRU, NOW
from sglang_canopy.whatif.sampled_caches import SampledCaches, ShadowResult
from sglang_canopy.whatif.total import combine_meters, describe_total

BLOCK = 16  # tokens


def fill(estimator, one_in, seed, requests=400):
    """Requests of 20 blocks: the server and the control have the first 5, an arm 5 to 20."""
    draw, sampler, gained_blocks = random.Random(seed), SampledCaches(one_in), 0
    for _ in range(requests):
        path = [draw.randrange(1 << 62) for _ in range(20)]
        reach = draw.choice((5, 10, 20))
        gained_blocks += reach - 5
        estimator.record_served(0.0, 20 * BLOCK, 5 * BLOCK, 15 * BLOCK)
        blocks = sampler.sampled_blocks(path)
        if blocks:
            hit_blocks = len(sampler.sampled_blocks(path[:5]))
            arm_blocks = len(sampler.sampled_blocks(path[:reach]))
            stands_for = BLOCK * one_in
            sample = ShadowResult(
                tuple(blocks),
                len(blocks) * stands_for,
                {"arm": arm_blocks},
                {"arm": arm_blocks * stands_for},
            )
            estimator.record_sample(sample, hit_blocks, hit_blocks, BLOCK, one_in)
    return gained_blocks / (20 * requests)


def test_with_every_block_sampled_the_lead_is_exact():
    estimator = HitRatioEstimator(math.inf)
    true_lead = fill(estimator, 1, seed=1)
    assert estimator.served_ratio() == pytest.approx(0.25)
    assert estimator.lead("arm") == pytest.approx(true_lead)
    assert estimator.sampling_error("arm") == 0.0
    assert estimator.error("arm") > 0.0
    assert estimator.lead("unknown") == pytest.approx(-0.25)


@pytest.mark.parametrize("one_in", [2, 8, 32])
def test_a_sample_is_unbiased_with_the_stated_error(one_in):
    deviations, stated = [], []
    for seed in range(20):
        estimator = HitRatioEstimator(math.inf)
        true_lead = fill(estimator, one_in, seed)
        deviations.append(estimator.lead("arm") - true_lead)
        stated.append(estimator.sampling_error("arm"))
    spread = math.sqrt(sum(error**2 for error in deviations) / 20)
    assert abs(sum(deviations) / 20) < spread
    assert spread < math.sqrt(sum(error**2 for error in stated) / 20) < 3 * spread


def test_a_prefix_hit_by_every_cache_changes_no_estimate():
    leads = []
    for hot in range(2):
        estimator = HitRatioEstimator(math.inf)
        for _ in range(200):
            estimator.record_served(0.0, 40 * BLOCK, 30 * BLOCK, 10 * BLOCK)
            blocks = (7, *(random.Random(1).randrange(1 << 62) for _ in range(5)))[1 - hot :]
            hit, tokens = hot, len(blocks) * 2 * BLOCK
            sample = ShadowResult(blocks, tokens, {"arm": hit + 2}, {"arm": (hit + 2) * 2 * BLOCK})
            estimator.record_sample(sample, hit, hit, BLOCK, 2)
        leads.append(estimator.lead("arm"))
    assert leads[0] == pytest.approx(leads[1]) == pytest.approx(0.1)


@given(st.integers(0, 1000), st.sampled_from([1, 4]))
def test_old_requests_fade_at_any_weight(seed, one_in):
    """After a thousand memories nothing has overflowed, and only recent requests count."""
    estimator = HitRatioEstimator(10.0)
    fill(estimator, one_in, seed, requests=50)
    old_ratio = estimator.served_ratio()
    assert old_ratio == pytest.approx(0.25)
    estimator.record_served(10_000.0, 100, 80, 0)
    assert estimator.served_ratio() == pytest.approx(0.8)
    estimator.record_served(10_010.0, 100, 0, 0)
    assert estimator.served_ratio() == pytest.approx(0.8 * math.exp(-1) / (1 + math.exp(-1)))


def test_a_block_that_is_won_and_then_lost_again_adds_no_sampling_error():
    """Won and lost tokens of one block cancel; the missed tokens are of other blocks."""
    estimator, (first, *missed) = HitRatioEstimator(math.inf), [3 << 40, 5 << 40, 7 << 40, 11 << 40]

    def add(blocks, hit, control, arm):
        estimator.record_served(0.0, 2 * BLOCK, hit * 2 * BLOCK, (1 - hit) * 2 * BLOCK)
        sample = ShadowResult(blocks, 2 * BLOCK, {"arm": arm}, {"arm": arm * 2 * BLOCK})
        estimator.record_sample(sample, control, hit, BLOCK, 2)

    add((first,), 1, 0, 1)
    for block in missed:
        add((block,), 0, 0, 0)
    assert estimator.sampling_error("arm") > 0.0
    add((first,), 1, 1, 0)
    assert estimator.sampling_error("arm") == 0.0
    assert estimator.lead("arm") == 0.0


def test_a_rescaled_estimator_states_the_same_error():
    """Weights are rescaled after 25 memories; the error of earlier requests fades with their tokens."""
    stated = []
    for between_s in (0.0, 26.0):  # in one run the weights are rescaled, in the other they are not
        estimator = HitRatioEstimator(1.0)
        fill(estimator, 4, seed=1, requests=60)
        estimator.record_served(between_s, 0, 0, 0)
        errors = estimator.sampling_error("arm"), estimator.error("arm")
        stated.append((*errors, estimator.lead("arm"), estimator.sampled_ratio("arm")))
    assert min(stated[0]) > 0.0
    assert stated[1] == pytest.approx(stated[0])


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
        "spent_s": 0.5,
        "undecided": None if sampled else "too few requests: 0 of 200",
        "floor": {"policy": LRU, "behind": False, "falls": 0},
    }


def test_replicas_are_weighted_by_their_samples():
    total = combine_meters([stats(0.4, 300, 0.5), stats(0.8, 100, 0.9), stats(0.0, 0, 0.0)])
    assert total["hit_ratio"] == pytest.approx(0.5)
    assert [arm["hit_ratio"] for arm in total["arms"]] == pytest.approx([0.5, 0.6])
    assert total["arms"][0]["tokens"] == 300
    assert total["undecided"] is None
    assert describe_total(total) == "canopy-lru hits 50.0 %, wa would hit 60.0 ± 4.0 %"
    assert combine_meters([]) is None
    assert combine_meters([stats(0.0, 0, 0.0)])["hit_ratio"] == 0.0
