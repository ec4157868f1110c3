"""Sums of a sample against the sums over all, fading, the stated error, and totals of replicas."""

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_canopy.whatif.estimator import HitRatioEstimator
from sglang_canopy.whatif.meter import LRU, NOW_LABEL
from sglang_canopy.whatif.sampled_caches import SampledCaches, ShadowResult
from sglang_canopy.whatif.total import combine_meters, describe_total

BLOCK_TOKENS = 16


def serve_requests(estimator, sample_stride, seed, request_count=400):
    """Serve requests of 20 blocks, of which the server and the control cache 5 and an arm 5 to 20. Return the
    arm's true lead."""
    rng, sampler, gained_blocks = random.Random(seed), SampledCaches(sample_stride), 0
    for _ in range(request_count):
        path = [rng.randrange(1 << 62) for _ in range(20)]
        arm_hit_blocks = rng.choice((5, 10, 20))
        gained_blocks += arm_hit_blocks - 5
        estimator.record_served(0.0, 20 * BLOCK_TOKENS, 5 * BLOCK_TOKENS, 15 * BLOCK_TOKENS)
        blocks = sampler.sampled_blocks(path)
        if blocks:
            hit_blocks = len(sampler.sampled_blocks(path[:5]))
            arm_blocks = len(sampler.sampled_blocks(path[:arm_hit_blocks]))
            represented_tokens = BLOCK_TOKENS * sample_stride
            sample = ShadowResult(
                tuple(blocks),
                len(blocks) * represented_tokens,
                {"arm": arm_blocks},
                {"arm": arm_blocks * represented_tokens},
            )
            estimator.record_sample(sample, hit_blocks, hit_blocks, BLOCK_TOKENS, sample_stride)
    return gained_blocks / (20 * request_count)


def test_with_every_block_sampled_the_lead_is_exact():
    estimator = HitRatioEstimator(math.inf)
    true_lead = serve_requests(estimator, 1, seed=1)
    assert estimator.served_ratio() == pytest.approx(0.25)
    assert estimator.lead("arm") == pytest.approx(true_lead)
    assert estimator.sampling_error("arm") == 0.0
    assert estimator.standard_error("arm") > 0.0
    assert estimator.lead("unknown") == pytest.approx(-0.25)


@pytest.mark.parametrize("sample_stride", [2, 8, 32])
def test_a_sample_is_unbiased_with_the_stated_error(sample_stride):
    deviations, stated_errors = [], []
    for seed in range(20):
        estimator = HitRatioEstimator(math.inf)
        true_lead = serve_requests(estimator, sample_stride, seed)
        deviations.append(estimator.lead("arm") - true_lead)
        stated_errors.append(estimator.sampling_error("arm"))
    spread = math.sqrt(sum(error**2 for error in deviations) / 20)
    assert abs(sum(deviations) / 20) < spread
    assert spread < math.sqrt(sum(error**2 for error in stated_errors) / 20) < 3 * spread


def test_a_prefix_hit_by_every_cache_changes_no_estimate():
    leads = []
    for hot_blocks in range(2):
        estimator = HitRatioEstimator(math.inf)
        for _ in range(200):
            estimator.record_served(0.0, 40 * BLOCK_TOKENS, 30 * BLOCK_TOKENS, 10 * BLOCK_TOKENS)
            blocks = (7, *(random.Random(1).randrange(1 << 62) for _ in range(5)))[1 - hot_blocks :]
            tokens, arm_blocks = len(blocks) * 2 * BLOCK_TOKENS, hot_blocks + 2
            arm_tokens = arm_blocks * 2 * BLOCK_TOKENS
            sample = ShadowResult(blocks, tokens, {"arm": arm_blocks}, {"arm": arm_tokens})
            estimator.record_sample(sample, hot_blocks, hot_blocks, BLOCK_TOKENS, 2)
        leads.append(estimator.lead("arm"))
    assert leads[0] == pytest.approx(leads[1]) == pytest.approx(0.1)


@given(st.integers(0, 1000), st.sampled_from([1, 4]))
def test_old_requests_fade_at_any_weight(seed, sample_stride):
    """After a thousand times the memory no weight overflows, and only recent requests count."""
    estimator = HitRatioEstimator(10.0)
    serve_requests(estimator, sample_stride, seed, request_count=50)
    assert estimator.served_ratio() == pytest.approx(0.25)
    estimator.record_served(10_000.0, 100, 80, 0)
    assert estimator.served_ratio() == pytest.approx(0.8)
    estimator.record_served(10_010.0, 100, 0, 0)
    assert estimator.served_ratio() == pytest.approx(0.8 * math.exp(-1) / (1 + math.exp(-1)))


def test_a_block_that_is_gained_and_then_lost_again_adds_no_sampling_error():
    """Gained and lost tokens of one block cancel; the missed tokens are of other blocks."""
    estimator, changing_block = HitRatioEstimator(math.inf), 3 << 40

    def add(blocks, served_hit, control_hit, arm_hit):
        tokens = 2 * BLOCK_TOKENS
        estimator.record_served(0.0, tokens, served_hit * tokens, (1 - served_hit) * tokens)
        sample = ShadowResult(blocks, tokens, {"arm": arm_hit}, {"arm": arm_hit * tokens})
        estimator.record_sample(sample, control_hit, served_hit, BLOCK_TOKENS, 2)

    add((changing_block,), 1, 0, 1)
    for block in (5 << 40, 7 << 40, 11 << 40):
        add((block,), 0, 0, 0)
    assert estimator.sampling_error("arm") > 0.0
    add((changing_block,), 1, 1, 0)
    assert estimator.sampling_error("arm") == 0.0
    assert estimator.lead("arm") == 0.0


def test_a_rescaled_estimator_states_the_same_error():
    """Weights are rescaled after 25 memories; the error of earlier requests fades with their tokens."""
    estimates = []
    for later_s in (0.0, 26.0):  # in one run the weights are rescaled, in the other they are not
        estimator = HitRatioEstimator(1.0)
        serve_requests(estimator, 4, seed=1, request_count=60)
        estimator.record_served(later_s, 0, 0, 0)
        errors = estimator.sampling_error("arm"), estimator.standard_error("arm")
        estimates.append((*errors, estimator.lead("arm"), estimator.sampled_ratio("arm")))
    assert min(estimates[0]) > 0.0
    assert estimates[1] == pytest.approx(estimates[0])


def meter_stats(hit_ratio, sampled_requests, wa_hit_ratio):
    arm_fields = {"capacity": NOW_LABEL, "tokens": 100, "sampled_hit_ratio": 0.5}
    arm_fields |= {"standard_error": 0.02, "sampling_error": 0.01}
    return {
        "running": LRU,
        "hit_ratio": hit_ratio,
        "arms": [
            {**arm_fields, "policy": LRU, "hit_ratio": hit_ratio, "running": True},
            {**arm_fields, "policy": "wa", "hit_ratio": wa_hit_ratio, "running": False},
        ],
        "one_block_in": 4,
        "too_small": [],
        "sampled_requests": sampled_requests,
        "spent_s": 0.5,
        "undecided": None if sampled_requests else "too few requests: 0 of 200",
        "floor": {"policy": LRU, "behind": False, "falls": 0},
    }


def test_replicas_are_weighted_by_their_samples():
    stats = (meter_stats(0.4, 300, 0.5), meter_stats(0.8, 100, 0.9), meter_stats(0.0, 0, 0.0))
    total = combine_meters(stats)
    assert total["hit_ratio"] == pytest.approx(0.5)
    assert [arm["hit_ratio"] for arm in total["arms"]] == pytest.approx([0.5, 0.6])
    assert total["arms"][0]["tokens"] == 300
    assert total["undecided"] is None
    assert describe_total(total) == "canopy-lru hits 50.0 %, wa would hit 60.0 ± 4.0 %"
    assert combine_meters([]) is None
    assert combine_meters([meter_stats(0.0, 0, 0.0)])["hit_ratio"] == 0.0
