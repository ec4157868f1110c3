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
    archive = data_dir / "agentic_coding" / "traces_500.tar.xz"
    return list(overlay(archive, 80, 3600.0, 1))


def run(trace, name, capacity_share, options=None, **fields):
    blocks = int(distinct_blocks(trace) * capacity_share)
    return simulate(trace, make_policy(name, options), blocks, **fields)


@pytest.fixture(scope="module")
def gain(request):
    """Points of block hit ratio that wa wins; each simulation runs once."""

    @cache
    def hit_ratio(trace, name, share):
        return run(request.getfixturevalue(trace), name, share).block_hit_ratio

    def gain(trace, share, baseline="lru"):
        return 100 * (hit_ratio(trace, "wa", share) - hit_ratio(trace, baseline, share))

    return gain


@pytest.mark.parametrize(
    ("capacity_share", "points"),
    [
        (0.05, 1.3),
        *(pytest.param(*pair, marks=pytest.mark.long) for pair in ((0.02, 3.0), (0.1, 0.5))),
    ],
)
def test_wa_against_lru_on_the_conversation_trace(gain, capacity_share, points):
    assert gain("conversation", capacity_share) >= points


def test_wa_against_lru_on_agents(gain):
    assert gain("agentic", 0.05) >= 2.5


@pytest.mark.parametrize(
    "capacity_share", [0.2, *(pytest.param(share, marks=pytest.mark.long) for share in (0.01, 0.5))]
)
def test_wa_loses_nowhere_by_more_than_a_third_of_a_point(gain, capacity_share):
    assert gain("conversation", capacity_share) >= -0.3
    assert gain("synthetic", capacity_share) >= -0.3


@pytest.mark.parametrize("baseline", ["fifo", "lfu"])
def test_wa_is_no_worse_than_any_simple_baseline(gain, baseline):
    for capacity_share in (0.05, 0.1):
        assert gain("conversation", capacity_share, baseline) >= -0.5
        assert gain("synthetic", capacity_share, baseline) >= -0.5


def test_etlru_cuts_the_tail_and_keeps_the_hits(conversation):
    threshold = {"threshold_tokens": 42 * 512.0}
    lru = run(conversation, "lru", 0.1, **threshold)
    etlru = run(conversation, "etlru", 0.1, threshold, **threshold)
    assert etlru.uncached_tokens_p95 <= 0.95 * lru.uncached_tokens_p95
    assert etlru.tel_tokens <= 0.92 * lru.tel_tokens
    assert etlru.block_hit_ratio >= lru.block_hit_ratio - 0.005
