"""Kareto's observations 1 to 6 (arXiv 2603.08739, section 3.3) in the simulator.

Density is the arrival rate over the system's capacity. Each observation compares two or more runs that
differ in one setting.
"""

import random
from itertools import pairwise

import numpy as np
import pytest

from canopy_lab.sim.system import SystemConfig, SystemResult, TierSpec, simulate_system
from canopy_lab.trace.record import TraceRequest
from support.systems import KV_BYTES, profile, request, rounds

DEVICE_TOKENS = 300
"""Tokens: three prompts of 100, each 0.1 s to compute."""
IDLE_S, BUSY_S = 1.0, 0.03
"""Seconds between two requests: at a tenth of the capacity, and at three times the capacity."""
DRAM_PROMPTS = (0, 6, 12, 18, 24)
"""Sizes of DRAM, in prompts."""


def run(trace: list[TraceRequest], **config) -> SystemResult:
    config.setdefault("prefetch_threshold_tokens", 1)
    config.setdefault("load_back_threshold_tokens", 1)
    return simulate_system(
        trace, SystemConfig(device_tokens=DEVICE_TOKENS, quantum_tokens=1, **config), profile()
    )


def tier(prompts: float, **options) -> TierSpec:
    return TierSpec(prompts * 100 * KV_BYTES, 1e9, 1e9, **options)


def host(prompts: float) -> TierSpec | None:
    return tier(prompts) if prompts else None


def recurring(interval_s: float, prompts: int = 27, times: int = 16) -> list[TraceRequest]:
    """Prompts in random order: hits grow about linearly with the cache."""
    draw, order = random.Random(1), []
    for _ in range(times):
        order += draw.sample(range(prompts), prompts)
    return [
        request(i * interval_s, tuple(range(prompt * 10 + 1, prompt * 10 + 11)))
        for i, prompt in enumerate(order)
    ]


def by_dram(interval_s: float) -> list[SystemResult]:
    return [run(recurring(interval_s), host=host(n)) for n in DRAM_PROMPTS]


def test_1_at_low_density_throughput_is_the_arrival_rate_for_any_storage():
    results = by_dram(IDLE_S)
    for result in results:
        assert result.throughput_tokens_per_s == pytest.approx(101 / IDLE_S, rel=0.01)
    ttft = [r.mean_ttft_s for r in results]
    assert ttft == sorted(ttft, reverse=True)
    assert ttft[-1] < 0.5 * ttft[0]


def disk_hits(interval_s: float, policy: str) -> float:
    """Return the hits of a disk that has all prompts, with little DRAM."""
    disk = TierSpec(1e9, 4e6, 1e9)  # 23 ms to read a prompt, 100 ms to compute it
    result = run(recurring(interval_s), host=tier(8), disk=disk, prefetch_policy=policy,
                 chunked_prefill_tokens=100)  # fmt: skip
    return result.token_hit_ratio_by_tier["disk"]


def test_2_at_low_density_a_disk_is_hit_only_if_requests_wait_for_it():
    # No request waits, so no request has time to read.
    assert disk_hits(IDLE_S, "wait_complete") > 0.5
    assert disk_hits(IDLE_S, "best_effort") == 0.0


def test_3_at_high_density_more_storage_raises_throughput_and_lowers_latency():
    results = by_dram(BUSY_S)
    throughput = [r.throughput_tokens_per_s for r in results]
    ttft = [r.mean_ttft_s for r in results]
    assert all(b > 1.05 * a for a, b in pairwise(throughput))
    assert ttft == sorted(ttft, reverse=True)
    assert ttft[-1] < 0.5 * ttft[0]
    # Nearly linear in the size.
    assert np.corrcoef(DRAM_PROMPTS, throughput)[0, 1] > 0.9


def test_4_at_high_density_the_queue_gives_the_disk_its_time():
    assert disk_hits(BUSY_S, "best_effort") > 0.8 * disk_hits(BUSY_S, "wait_complete") > 0.2


def test_5_a_larger_disk_is_faster_even_beyond_the_distinct_kv():
    trace, hits = rounds(10, 2), set()
    for size in (1.2e6, 2.4e6, 4.8e6):  # all of them hold the ten prompts
        disk = TierSpec(size, 0.5 * size, 0.5 * size)
        result = run(trace, host=tier(4), disk=disk, prefetch_policy="wait_complete")
        hits.add(result.token_hit_ratio)
        # 90 tokens read from the disk, loaded from the host; the last ten are computed.
        expected = 90 * KV_BYTES / (0.5 * size) + 90 * KV_BYTES / 1e9 + 0.01
        assert result.ttft_s[10:].mean() == pytest.approx(expected, rel=0.02)
    assert len(hits) == 1


def test_5_a_disk_too_slow_for_drams_evictions_gains_nothing():
    # Every disk has room for all 27 prompts; the slowest writes 5 of 1,000 tokens per second.
    trace = recurring(BUSY_S, times=4)
    hit_ratios = []
    for bandwidth in (5e3, 2e5, 4e6):
        disk = TierSpec(1e9, bandwidth, bandwidth, shared_channel=True)
        hit_ratios.append(run(trace, host=tier(6), disk=disk).token_hit_ratio_by_tier["disk"])
    assert hit_ratios[0] < 0.02
    assert hit_ratios[2] > hit_ratios[1] >= hit_ratios[0]
    assert hit_ratios[2] > 0.15


def test_6_dram_and_disk_together_are_on_the_front_of_latency_and_cost():
    trace = recurring(BUSY_S)
    disk = TierSpec(27 * 100 * KV_BYTES, 4e6, 4e6, shared_channel=True)
    price_per_prompt = {"dram": 10.0, "disk": 1.0}
    points = {}
    for dram, has_disk in ((0, False), (9, False), (18, False), (27, False), (1, True), (9, True)):
        result = run(trace, host=host(dram), disk=disk if has_disk else None)
        cost = dram * price_per_prompt["dram"] + 27 * has_disk * price_per_prompt["disk"]
        points[dram, has_disk] = (result.mean_ttft_s, cost)
    both, disk_only, all_dram = points[9, True], points[1, True], points[27, False]
    assert both[0] < 0.8 * disk_only[0]
    assert both[1] < 0.5 * all_dram[1]
    dominating = [p for p in points.values() if p != both and p[0] <= both[0] and p[1] <= both[1]]
    assert dominating == []
