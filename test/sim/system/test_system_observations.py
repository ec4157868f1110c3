"""Kareto's observations 1 to 6 (arXiv 2603.08739, section 3.3) in the simulator.

Density is the arrival rate over the system's capacity. Each observation compares two or more runs that
differ in one setting.
"""

import random
from itertools import pairwise
from typing import NamedTuple

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


class CostPoint(NamedTuple):
    ttft_s: float
    cost: float


def run(trace: list[TraceRequest], **fields) -> SystemResult:
    fields.setdefault("prefetch_threshold_tokens", 1)
    fields.setdefault("load_back_threshold_tokens", 1)
    system = SystemConfig(device_tokens=DEVICE_TOKENS, quantum_tokens=1, **fields)
    return simulate_system(trace, system, profile())


def tier_of(prompts: float) -> TierSpec:
    return TierSpec(prompts * 100 * KV_BYTES, 1e9, 1e9)


def host_of(prompts: float) -> TierSpec | None:
    return tier_of(prompts) if prompts else None


def recurring_prompts(interval_s: float, repeats: int = 16) -> list[TraceRequest]:
    """Return 27 prompts, each time in random order: hits grow about linearly with the cache."""
    rng, order = random.Random(1), []
    for _ in range(repeats):
        order += rng.sample(range(27), 27)
    return [
        request(i * interval_s, tuple(range(prompt * 10 + 1, prompt * 10 + 11)))
        for i, prompt in enumerate(order)
    ]


def results_by_dram(interval_s: float) -> list[SystemResult]:
    return [run(recurring_prompts(interval_s), host=host_of(prompts)) for prompts in DRAM_PROMPTS]


def test_1_at_low_density_throughput_is_the_arrival_rate_for_any_storage():
    results = results_by_dram(IDLE_S)
    for result in results:
        assert result.throughput_tokens_per_s == pytest.approx(101 / IDLE_S, rel=0.01)
    ttft_s = [result.mean_ttft_s for result in results]
    assert ttft_s == sorted(ttft_s, reverse=True)
    assert ttft_s[-1] < 0.5 * ttft_s[0]


def disk_hit_ratio(interval_s: float, policy: str) -> float:
    """Return the hit ratio of a disk that has all prompts, with little DRAM."""
    disk = TierSpec(1e9, 4e6, 1e9)  # 23 ms to read a prompt, 100 ms to compute it
    result = run(recurring_prompts(interval_s), host=tier_of(8), disk=disk, prefetch_policy=policy,
                 chunked_prefill_tokens=100)  # fmt: skip
    return result.token_hit_ratio_by_tier["disk"]


def test_2_at_low_density_a_disk_is_hit_only_if_requests_wait_for_it():
    # No request waits, so no request has time to read.
    assert disk_hit_ratio(IDLE_S, "wait_complete") > 0.5
    assert disk_hit_ratio(IDLE_S, "best_effort") == 0.0


def test_3_at_high_density_more_storage_raises_throughput_and_lowers_latency():
    results = results_by_dram(BUSY_S)
    throughput = [result.throughput_tokens_per_s for result in results]
    ttft_s = [result.mean_ttft_s for result in results]
    assert all(after > 1.05 * before for before, after in pairwise(throughput))
    assert ttft_s == sorted(ttft_s, reverse=True)
    assert ttft_s[-1] < 0.5 * ttft_s[0]
    # Nearly linear in the size.
    assert np.corrcoef(DRAM_PROMPTS, throughput)[0, 1] > 0.9


def test_4_at_high_density_the_queue_gives_the_disk_its_time():
    best_effort = disk_hit_ratio(BUSY_S, "best_effort")
    assert best_effort > 0.8 * disk_hit_ratio(BUSY_S, "wait_complete") > 0.2


def test_5_a_larger_disk_is_faster_even_beyond_the_distinct_kv():
    trace, hit_ratios = rounds(10, 2), set()
    for disk_bytes in (1.2e6, 2.4e6, 4.8e6):  # all of them hold the ten prompts
        disk = TierSpec(disk_bytes, 0.5 * disk_bytes, 0.5 * disk_bytes)
        result = run(trace, host=tier_of(4), disk=disk, prefetch_policy="wait_complete")
        hit_ratios.add(result.token_hit_ratio)
        # 90 tokens read from the disk, loaded from the host; the last ten are computed.
        expected_s = 90 * KV_BYTES / (0.5 * disk_bytes) + 90 * KV_BYTES / 1e9 + 0.01
        assert result.ttft_s[10:].mean() == pytest.approx(expected_s, rel=0.02)
    assert len(hit_ratios) == 1


def test_5_a_disk_too_slow_for_drams_evictions_gains_nothing():
    # Every disk has room for all 27 prompts; the slowest writes 5 of 1,000 tokens per second.
    trace = recurring_prompts(BUSY_S, repeats=4)
    hit_ratios = []
    for bytes_per_s in (5e3, 2e5, 4e6):
        disk = TierSpec(1e9, bytes_per_s, bytes_per_s, shared_channel=True)
        hit_ratios.append(run(trace, host=tier_of(6), disk=disk).token_hit_ratio_by_tier["disk"])
    assert hit_ratios[0] < 0.02
    assert hit_ratios[2] > hit_ratios[1] >= hit_ratios[0]
    assert hit_ratios[2] > 0.15


def test_6_dram_and_disk_together_are_on_the_front_of_latency_and_cost():
    trace = recurring_prompts(BUSY_S)
    disk = TierSpec(27 * 100 * KV_BYTES, 4e6, 4e6, shared_channel=True)
    price_per_prompt = {"dram": 10.0, "disk": 1.0}
    points = {}
    sizes = [(prompts, False) for prompts in (0, 9, 18, 27)]
    for dram_prompts, has_disk in (*sizes, (1, True), (9, True)):
        result = run(trace, host=host_of(dram_prompts), disk=disk if has_disk else None)
        cost = dram_prompts * price_per_prompt["dram"] + 27 * has_disk * price_per_prompt["disk"]
        points[dram_prompts, has_disk] = CostPoint(result.mean_ttft_s, cost)
    both, disk_only, all_dram = points[9, True], points[1, True], points[27, False]
    assert both.ttft_s < 0.8 * disk_only.ttft_s
    assert both.cost < 0.5 * all_dram.cost
    others = [point for point in points.values() if point != both]
    assert all(point.ttft_s > both.ttft_s or point.cost > both.cost for point in others)
