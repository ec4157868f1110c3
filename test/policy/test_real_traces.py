"""Gains of wa and etlru on the public traces: a shorter form of benchmark/eviction/claims.py."""

from functools import cache

import pytest
from overlays import overlay

from canopy_lab.sim.driver import distinct_blocks, simulate
from canopy_lab.trace.open import open_trace
from sglang_canopy.policy.registry import make_policy


@pytest.fixture(scope="module")
def conversation(data_dir):
    return list(open_trace(data_dir / "mooncake" / "conversation_first60.jsonl", "mooncake"))


@pytest.fixture(scope="module")
def synthetic(data_dir):
    return list(open_trace(data_dir / "mooncake" / "synthetic_trace.jsonl", "mooncake"))


@pytest.fixture(scope="module")
def agentic(data_dir):
    return list(overlay(data_dir / "agentic_coding" / "traces_500.tar.xz", 80, 3600.0, 1))


def simulate_policy(trace, name, capacity_ratio, options=None, **fields):
    blocks = int(distinct_blocks(trace) * capacity_ratio)
    return simulate(trace, make_policy(name, options), blocks, **fields)


@pytest.fixture(scope="module")
def gain(request):
    """Return a function: points of block hit ratio that wa wins. Each simulation runs once."""

    @cache
    def hit_ratio(trace_name, policy_name, capacity_ratio):
        trace = request.getfixturevalue(trace_name)
        return simulate_policy(trace, policy_name, capacity_ratio).block_hit_ratio

    def gain_of_wa(trace_name, capacity_ratio, baseline="lru"):
        wa_ratio = hit_ratio(trace_name, "wa", capacity_ratio)
        return 100 * (wa_ratio - hit_ratio(trace_name, baseline, capacity_ratio))

    return gain_of_wa


@pytest.mark.parametrize(
    ("capacity_ratio", "min_points"),
    [
        (0.05, 1.3),
        *(pytest.param(*pair, marks=pytest.mark.long) for pair in ((0.02, 3.0), (0.1, 0.5))),
    ],
)
def test_wa_wins_against_lru_on_the_conversation_trace(gain, capacity_ratio, min_points):
    assert gain("conversation", capacity_ratio) >= min_points


def test_wa_wins_against_lru_on_agents(gain):
    assert gain("agentic", 0.05) >= 2.5


@pytest.mark.parametrize(
    "capacity_ratio", [0.2, *(pytest.param(ratio, marks=pytest.mark.long) for ratio in (0.01, 0.5))]
)
def test_wa_loses_nowhere_by_more_than_a_third_of_a_point(gain, capacity_ratio):
    assert gain("conversation", capacity_ratio) >= -0.3
    assert gain("synthetic", capacity_ratio) >= -0.3


@pytest.mark.parametrize("baseline", ["fifo", "lfu"])
def test_wa_loses_to_no_simple_baseline_by_more_than_half_a_point(gain, baseline):
    for capacity_ratio in (0.05, 0.1):
        assert gain("conversation", capacity_ratio, baseline) >= -0.5
        assert gain("synthetic", capacity_ratio, baseline) >= -0.5


def test_etlru_shortens_the_tail_and_keeps_the_hits(conversation):
    threshold = {"threshold_tokens": 42 * 512.0}
    lru = simulate_policy(conversation, "lru", 0.1, **threshold)
    etlru = simulate_policy(conversation, "etlru", 0.1, threshold, **threshold)
    assert etlru.uncached_tokens_p95 <= 0.95 * lru.uncached_tokens_p95
    assert etlru.tel_tokens <= 0.92 * lru.tel_tokens
    assert etlru.block_hit_ratio >= lru.block_hit_ratio - 0.005
