"""The meter agrees with full simulations, is equal on every rank, and is bounded."""

import math
import random
import time
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_canopy.policy.block_tree import RadixTree
from sglang_canopy.policy.registry import make_policy
from sglang_canopy.records import Request
from sglang_canopy.whatif.floor import Floor
from sglang_canopy.whatif.meter import (
    LRU,
    NOW_LABEL,
    TIMED_STRIDE,
    Meter,
    MeterSetup,
    ShadowArm,
    TierTokens,
)
from sglang_canopy.whatif.sampled_caches import MIN_BLOCKS, Origins
from sglang_canopy.whatif.total import combine_meters, describe_total

BLOCK_TOKENS = 16
THRESHOLD_CONFIG = {"threshold-lru": {"threshold_tokens": 5 * BLOCK_TOKENS}}


def request_at(time_s, path, category="default"):
    """Return a request of whole blocks."""
    tokens = {"block_tokens": BLOCK_TOKENS, "prompt_tokens": BLOCK_TOKENS * len(path)}
    return Request(time_s, category, tuple(path), **tokens)


def chat_turns(seed, conversations=40, turns=8):
    """Yield (conversation, request) of growing conversations, which all share a head."""
    rng = random.Random(seed)
    paths = {}
    for step in range(conversations * turns):
        conversation = rng.randrange(conversations)
        path = paths.setdefault(conversation, [1, 2, 10_000 * (conversation + 1)])
        path.extend(10_000 * (conversation + 1) + len(path) + i for i in range(rng.randint(1, 3)))
        yield conversation, request_at(10.0 * step, path, rng.choice(["chat", "agent"]))


def serve(policy, capacity_blocks, seed, meter=None):
    """Return the hit ratio of a tree of ``capacity_blocks``; ``meter`` receives every request."""
    tree = RadixTree(make_policy(policy), capacity_blocks, BLOCK_TOKENS)
    hit_tokens = prompt_tokens = 0
    for _, request in chat_turns(seed):
        request_hit_tokens = tree.access(request) * BLOCK_TOKENS
        hit_tokens += request_hit_tokens
        prompt_tokens += request.prompt_tokens
        if meter is not None:
            meter.record_request(request, request_hit_tokens)
    return hit_tokens / prompt_tokens


def record_all(meter, requests):
    """Record requests of which the server hit nothing."""
    for request in requests:
        meter.record_request(request, 0)


def shadow_hit_ratio(meter, policy, capacity):
    """Return the hit ratio of an arm's shadow cache, of a meter that forgets nothing."""
    rows = {(row["policy"], row["capacity"]): row for row in meter.describe_arms()}
    return rows[policy, capacity]["sampled_hit_ratio"]


@settings(max_examples=settings.default.max_examples // 5)
@given(st.integers(0, 10_000), st.integers(20, 200))
def test_with_all_blocks_sampled_the_meter_equals_the_simulation(seed, blocks):
    setup = MeterSetup((LRU, "wa"), (1.0, 2.0, 0.5), memory_s=math.inf)
    meter = Meter(setup, TierTokens(blocks * BLOCK_TOKENS), "canopy-lru")
    serve("lru", blocks, seed, meter)
    for name in ("lru", "wa"):
        for factor, capacity in ((1, NOW_LABEL), (2, "device x2"), (0.5, "device x0.5")):
            arm = LRU if name == "lru" else name
            simulated = serve(name, int(blocks * factor), seed)
            # The meter receives a request at its end, a policy at its arrival: a fit may differ.
            tolerance = 1e-5 if name == "lru" else 0.02
            assert shadow_hit_ratio(meter, arm, capacity) == pytest.approx(simulated, abs=tolerance)


def document_requests(seed):
    """Yield requests with one of 60 documents each."""
    rng = random.Random(seed)
    for step in range(1200):
        document = rng.randrange(60)
        path = [10_000 * (document + 1) + i for i in range(20)]
        path += [10**8 + 100 * step + i for i in range(2)]
        yield request_at(float(step), path)


class ArmError(NamedTuple):
    hit_ratio_error: float
    stated_error: float


def estimate_errors(sample_stride, seed):
    """Return the error of an arm's hit ratio, and the standard error that the meter states."""
    requests, blocks = list(document_requests(seed)), 400
    hit_tokens = {}
    for factor in (1, 2):
        tree = RadixTree(make_policy("lru"), factor * blocks, BLOCK_TOKENS)
        hit_tokens[factor] = [tree.access(request) * BLOCK_TOKENS for request in requests]
    setup = MeterSetup((LRU,), (1.0, 2.0), sample_stride, memory_s=math.inf)
    meter = Meter(setup, TierTokens(blocks * BLOCK_TOKENS), LRU)
    for request, tokens in zip(requests, hit_tokens[1]):
        meter.record_request(request, tokens)
    true_ratio = sum(hit_tokens[2]) / sum(request.prompt_tokens for request in requests)
    row = meter.describe_arms()[1]
    assert row["capacity"] == "device x2"
    return ArmError(row["hit_ratio"] - true_ratio, row["sampling_error"])


def test_shared_prefixes_are_not_lost_in_a_sample():
    """A sample of conversations would have each document once or never, and show no gain of more memory."""
    assert max(map(abs, [estimate_errors(8, seed).hit_ratio_error for seed in range(6)])) < 0.02


def test_the_stated_error_covers_the_real_one():
    for sample_stride in (4, 8):
        for error, stated_error in (estimate_errors(sample_stride, seed) for seed in range(8)):
            assert abs(error) < 2 * stated_error < 0.03
    assert estimate_errors(1, 1) == (pytest.approx(0.0, abs=1e-5), 0.0)


@pytest.mark.parametrize(("policy", "has_floor"), [("wa", True), ("canopy-tlru", False)])
def test_a_meter_without_a_floor_states_none(policy, has_floor):
    setup = MeterSetup((LRU,), configs={"canopy-tlru": {"threshold_tokens": 100}}, floor=has_floor)
    meter = Meter(setup, TierTokens(60 * BLOCK_TOKENS), policy)
    record_all(meter, (request for _, request in chat_turns(3)))
    assert (meter.stats()["floor"] is not None) == has_floor
    assert not meter.is_behind or has_floor


def test_the_time_of_one_request_in_a_stride_counts_for_all_of_it(monkeypatch):
    ticks = iter(range(10_000))
    monkeypatch.setattr(time, "thread_time", lambda: float(next(ticks)))
    meter, spent_s = Meter(MeterSetup((LRU,)), TierTokens(60 * BLOCK_TOKENS), LRU), []
    for second in range(2 * TIMED_STRIDE):
        meter.record_request(request_at(float(second), (second,)), 0)
        spent_s.append(meter.spent_s)
    assert spent_s == [0.0] * (TIMED_STRIDE - 1) + [float(TIMED_STRIDE)] * TIMED_STRIDE + [
        2.0 * TIMED_STRIDE
    ]


def test_the_floor_tolerates_two_standard_errors_of_the_sample(monkeypatch):
    tolerances = []
    monkeypatch.setattr(Floor, "compare", lambda *arguments: tolerances.append(arguments[4]))
    setup = MeterSetup((LRU, "threshold-lru"), sample_stride=4, configs=THRESHOLD_CONFIG)
    meter, errors = Meter(setup, TierTokens(4 * MIN_BLOCKS * BLOCK_TOKENS), "threshold-lru"), []
    for _, request in chat_turns(3, conversations=200):
        count_before = len(tolerances)
        meter.record_request(request, 0)
        if len(tolerances) > count_before:
            errors.append(meter._estimator.sampling_error(ShadowArm(LRU, NOW_LABEL)))
    assert max(errors) > 0.0
    assert tolerances == pytest.approx([2.0 * error for error in errors])


def test_every_estimate_builds_on_the_servers_own_hits():
    """The server hits nothing, so an arm's estimate is its lead over the running arm's shadow cache."""
    meter = Meter(MeterSetup((LRU,), (1.0, 4.0)), TierTokens(60 * BLOCK_TOKENS), LRU)
    record_all(meter, (request for _, request in chat_turns(3)))
    rows = {(row["policy"], row["capacity"]): row for row in meter.describe_arms()}
    assert rows[LRU, NOW_LABEL]["hit_ratio"] == 0.0
    assert rows[LRU, NOW_LABEL]["running"]
    larger_cache = rows[LRU, "device x4"]
    gain = larger_cache["sampled_hit_ratio"] - rows[LRU, NOW_LABEL]["sampled_hit_ratio"]
    assert larger_cache["hit_ratio"] == pytest.approx(gain, abs=1e-4) != 0.0


def test_a_hit_inside_a_block_leaves_the_whole_block_missed():
    """A shadow cache hits whole blocks, so the server's partial hits must not scale its lead down."""
    leads = []
    for partial_tokens in (0, BLOCK_TOKENS - 1):
        meter = Meter(MeterSetup((LRU,), (1.0, 4.0)), TierTokens(60 * BLOCK_TOKENS), LRU)
        for _, request in chat_turns(3):
            meter.record_request(request, partial_tokens)
        larger_cache = next(row for row in meter.describe_arms() if row["capacity"] == "device x4")
        leads.append(larger_cache["hit_ratio"] - meter.stats()["hit_ratio"])
    assert leads[1] == pytest.approx(leads[0], abs=3e-5)
    assert leads[0] > 0.05


def test_an_sglang_policy_without_an_equal_is_compared_by_sampled_hits():
    meter = Meter(MeterSetup((LRU,), (1.0,)), TierTokens(60 * BLOCK_TOKENS), "priority")
    for _, request in chat_turns(3):
        meter.record_request(request, request.prompt_tokens // BLOCK_TOKENS // 2 * BLOCK_TOKENS)
    (row,) = meter.describe_arms()
    assert row["hit_ratio"] == pytest.approx(row["sampled_hit_ratio"], abs=0.01)
    assert meter.stats()["hit_ratio"] == pytest.approx(0.48, abs=0.02)


def test_capacities_are_multiples_of_the_host_if_there_is_one():
    assert TierTokens(100).total(2.0) == 200
    assert TierTokens(100, 300).total(2.0) == 600
    assert TierTokens(100, 300, is_exclusive=True).total(2.0) == 700
    assert TierTokens(100, 50).total() == 100
    assert TierTokens(100, 300).label(2.0) == "host x2"
    assert TierTokens(100).label(0.5) == "device x0.5"
    assert TierTokens(100).label(1.0) == NOW_LABEL


def test_another_running_policy_restarts_the_estimates():
    meter = Meter(MeterSetup(), TierTokens(60 * BLOCK_TOKENS), LRU)
    serve("lru", 60, 5, meter)
    blocks_before = meter.caches.count_blocks()
    meter.restart("wa")
    assert blocks_before == meter.caches.count_blocks()  # no shadow cache was lost
    assert meter.stats()["hit_ratio"] == 0.0
    assert meter.stats()["running"] == "wa"


def mixed_requests(request_count, hot_blocks=4, new_blocks=6, period=2):
    """Yield requests. One in ``period`` has the same prompt of ``hot_blocks``, the others have new prompts of
    ``new_blocks``. ``threshold-lru`` evicts the shorter prompts first."""
    for step in range(request_count):
        new_path = range(1000 + 8 * step, 1000 + 8 * step + new_blocks)
        is_hot = step % period == period - 1
        yield request_at(float(step), range(1, 1 + hot_blocks) if is_hot else new_path)


def test_lru_ranks_while_the_policy_is_behind_it_and_no_longer():
    setup = MeterSetup((LRU,), (1.0,), configs=THRESHOLD_CONFIG)
    meter = Meter(setup, TierTokens(12 * BLOCK_TOKENS), "threshold-lru")
    record_all(meter, mixed_requests(800))
    assert meter.is_behind
    meter.restart(LRU)
    for request in mixed_requests(800, hot_blocks=8, new_blocks=2, period=4):
        request.time += 800.0
        meter.record_request(request, 0)
    assert not meter.is_behind


def test_a_policy_with_other_options_is_compared_as_it_runs():
    setup = MeterSetup((LRU, "threshold-lru"), (1.0,), configs=THRESHOLD_CONFIG)
    meter = Meter(setup, TierTokens(12 * BLOCK_TOKENS), "threshold-lru")
    record_all(meter, mixed_requests(800))
    assert shadow_hit_ratio(meter, "threshold-lru", NOW_LABEL) == 0.0
    assert shadow_hit_ratio(meter, LRU, NOW_LABEL) == pytest.approx(0.4, abs=0.01)
    blocks_before = meter.caches.count_blocks()
    meter.restart(LRU)
    meter.restart("threshold-lru")
    assert blocks_before == meter.caches.count_blocks()  # no shadow cache was lost


def test_a_few_requests_decide_nothing():
    meter = Meter(MeterSetup(), TierTokens(12 * BLOCK_TOKENS), LRU)
    record_all(meter, mixed_requests(5))
    assert meter.undecided_reason == "too few requests: 5 of 200"
    assert "too few requests" in describe_total(combine_meters([meter.stats()]))


def test_without_evictions_the_meter_is_undecided():
    meter = Meter(MeterSetup(), TierTokens(10**4 * BLOCK_TOKENS), LRU)
    record_all(meter, mixed_requests(300))
    assert meter.undecided_reason == "the cache has not filled: nothing to win"


def test_a_sample_that_leaves_too_few_blocks_decides_nothing(monkeypatch):
    """In shadow caches of a few blocks a policy could fall below the floor by chance."""
    setup = MeterSetup((LRU,), (1.0,), sample_stride=8, configs=THRESHOLD_CONFIG)
    meter = Meter(setup, TierTokens(8 * (MIN_BLOCKS - 1) * BLOCK_TOKENS), "threshold-lru")
    comparisons = []
    monkeypatch.setattr(Floor, "compare", lambda *arguments: comparisons.append(arguments))
    record_all(meter, mixed_requests(400, hot_blocks=40, new_blocks=60))
    assert meter.caches.sampled_requests > 300
    assert not comparisons
    assert meter.undecided_reason.startswith("too small a sample")
    assert meter.stats()["too_small"] == ["threshold-lru now", "canopy-lru now"]


def test_an_arm_with_too_few_blocks_is_not_reported():
    meter = Meter(MeterSetup((LRU,), (1.0, 1 / 64), 2), TierTokens(1_000 * BLOCK_TOKENS), LRU)
    record_all(meter, mixed_requests(1_000))
    assert [row["capacity"] for row in meter.describe_arms()] == [NOW_LABEL]
    assert meter.stats()["too_small"] == ["canopy-lru device x0.015625"]
    assert meter.undecided_reason is None


def test_an_estimate_of_few_requests_has_a_wide_interval():
    errors = []
    for request_count in (300, 3000):
        setup = MeterSetup(("threshold-lru", LRU), (1.0,), configs=THRESHOLD_CONFIG)
        meter = Meter(setup, TierTokens(12 * BLOCK_TOKENS), LRU)
        record_all(meter, mixed_requests(request_count))
        assert meter.undecided_reason is None
        (arm,) = (row for row in meter.describe_arms() if row["policy"] == "threshold-lru")
        assert arm["sampling_error"] == 0.0
        errors.append(arm["standard_error"])
    assert errors[0] > 2 * errors[1] > 0.0


@settings(max_examples=settings.default.max_examples // 5)
@given(st.integers(0, 10_000))
def test_two_ranks_with_equal_requests_give_equal_estimates(seed):
    stats_by_rank = []
    for _ in range(2):
        meter = Meter(MeterSetup(sample_stride=2), TierTokens(60 * BLOCK_TOKENS), LRU)
        serve("lru", 60, seed, meter)
        stats = meter.stats()
        del stats["spent_s"]
        stats_by_rank.append(stats)
    assert stats_by_rank[0] == stats_by_rank[1]


def test_all_turns_of_a_conversation_have_one_origin():
    origins, origin_of = Origins(), {}
    for conversation, request in chat_turns(7):
        origin = origins.number_of(request.path, request.prompt_tokens, BLOCK_TOKENS)
        assert origin_of.setdefault(conversation, origin) == origin
    assert len(set(origin_of.values())) == len(origin_of) == len(origins)


def test_origins_are_bounded_and_those_used_last_stay():
    origins = Origins(max_origins=10)
    for number in range(50):
        origins.number_of((5, 1000 + number), 2 * BLOCK_TOKENS, BLOCK_TOKENS)
        assert origins.number_of((5, 1000, 7 + number), 2 * BLOCK_TOKENS, BLOCK_TOKENS) == 1000
    assert len(origins) == 10


def test_the_meter_reports_uncounted_requests_and_keeps_the_count_across_a_change():
    meter = Meter(MeterSetup((LRU, "wa")), TierTokens(64 * BLOCK_TOKENS), LRU)
    record_all(meter, [request for _, request in chat_turns(3)][:30])
    for second in range(7):
        short_request = request_at(1e4 + second, ())
        short_request.prompt_tokens = BLOCK_TOKENS - 1
        meter.record_request(short_request, 0)
    reason = "too few requests: 30 of 200 (7 shorter than a block do not count)"
    assert meter.undecided_reason == reason
    meter.restart(LRU)
    meter.record_request(request_at(2e4, (1, 2)), 0)
    assert "1 of 200 (30 counted before the order changed, 7 shorter" in meter.undecided_reason
