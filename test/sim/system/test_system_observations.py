"""Kareto's observations 1 to 6 (arXiv 2603.08739), as the simulator shows them.

Each is read off two or more runs that differ in one thing.
"""

from __future__ import annotations

from itertools import pairwise

import pytest

from sglang_canopy.sim.system import SystemConfig, TierSpec, simulate_system
from support.systems import KV, profile, request, rounds

DEVICE = 300
"""Tokens: three prompts of 100."""


def run(trace, *, costs=None, **config):
    config.setdefault("prefetch_threshold_tokens", 1)
    config.setdefault("load_back_threshold_tokens", 1)
    return simulate_system(
        trace, SystemConfig(device_tokens=DEVICE, quantum_tokens=1, **config), costs or profile()
    )


def host(prompts: float, **others) -> TierSpec:
    return TierSpec(prompts * 100 * KV, 1e9, 1e9, **others)


def test_1_more_dram_raises_hits_and_throughput_with_diminishing_returns():
    # Prompts are asked again after 1, 2, 3, ... others: half of them soon, few of them late.
    order = [i for n in range(2, 26) for i in (*range(26 - n), *range(26 - n))]
    trace = [
        request(0.01 * i, tuple(range(which * 10 + 1, which * 10 + 11)))
        for i, which in enumerate(order)
    ]
    results = [run(trace, host=host(n) if n else None) for n in (0, 8, 16, 24, 32, 40)]
    hits = [r.token_hit_ratio for r in results]
    speed = [r.throughput_tokens_per_s for r in results]
    assert hits == sorted(hits)
    assert speed == sorted(speed)
    gains = [b - a for a, b in pairwise(hits)]
    assert gains[0] > 0
    assert gains[-1] < gains[0] / 10
    assert hits[-1] == pytest.approx(hits[-2])


def test_2_a_slow_disk_is_worse_than_computing_anew_and_a_fast_one_better():
    trace = rounds(10, 4)
    recompute = run(trace, host=host(4))
    ttft = {}
    for name, speed in (("slow", 2e5), ("fast", 1e8)):
        disk = TierSpec(1e9, speed, 1e9)
        result = run(trace, host=host(4), disk=disk, prefetch_policy="wait_complete")
        assert result.token_hit_ratio_by_tier["disk"] > 0.5
        ttft[name] = result.mean_ttft_s
    # 100 tokens of 1,000 bytes: 0.5 s to read from the slow one, 0.1 s to compute.
    assert ttft["slow"] > recompute.mean_ttft_s
    assert ttft["fast"] < recompute.mean_ttft_s


def test_3_a_bigger_disk_is_a_faster_one_where_bandwidth_is_bought_with_size():
    trace, hits = rounds(10, 2), set()
    for size in (1.2e6, 2.4e6, 4.8e6):  # all of them hold the ten prompts
        disk = TierSpec.provisioned(size, bytes_per_s_per_byte=0.5)
        result = run(trace, host=host(4), disk=disk, prefetch_policy="wait_complete")
        hits.add(result.token_hit_ratio)
        # 90 tokens read from the disk, loaded from the host; the last ten are computed.
        expected = 90 * KV / (0.5 * size) + 90 * KV / 1e9 + 0.01
        assert result.ttft_s[10:].mean() == pytest.approx(expected, rel=0.02)
    assert len(hits) == 1
    capped = TierSpec.provisioned(1e9, bytes_per_s_per_byte=0.5, at_most=1e6)
    assert capped.read_bytes_per_s == 1e6


def test_4_reads_and_writes_on_one_channel_disturb_each_other():
    again = rounds(4, 1)
    fresh = [
        request(10.0 + 0.12 * i, tuple(range(5000 + i * 10, 5010 + i * 10))) for i in range(20)
    ]
    back = [request(10.6 + 0.5 * i, again[i].blocks) for i in range(4)]
    trace = sorted([*again, *fresh, *back], key=lambda r: r.time_s)
    results = {
        shared: run(
            trace,
            host=host(4),
            disk=TierSpec(1e9, 1e6, 1e6, shared_channel=shared),
            prefetch_policy="wait_complete",
        )
        for shared in (False, True)
    }
    assert results[True].token_hit_ratio == results[False].token_hit_ratio
    assert results[True].mean_ttft_s > results[False].mean_ttft_s


@pytest.mark.parametrize(("new", "hidden"), [(150, True), (1, False)])
def test_5_layerwise_loading_hides_behind_a_long_prefill_only(new, hidden):
    # 100 tokens on the host, at 1 MB/s: 0.1 s to load; ``new`` ms to compute.
    prompt = tuple(range(1, 11))
    push = [request(1.0 + i, tuple(range(1000 + i * 10, 1010 + i * 10))) for i in range(3)]
    blocks = -(-new // 10)
    back = request(10.0, prompt + tuple(range(500, 500 + blocks)))
    trace = [request(0.0, prompt), *push, back]
    slow = TierSpec(1e9, 1e6, 1e9)
    overlapped = run(trace, host=slow, costs=profile(layers=100)).ttft_s[-1]
    one_by_one = run(trace, host=slow, costs=profile(layers=1)).ttft_s[-1]
    compute = blocks * 10 * 0.001
    assert one_by_one == pytest.approx(compute + 0.1)
    assert overlapped == pytest.approx(max(compute + 0.1 / 100, 0.1 + compute / 100))
    assert (overlapped < compute * 1.05) == hidden


def test_6_the_disk_is_read_only_while_a_request_queues():
    hits = []
    for every_s in (1.0, 0.09, 0.07):  # a prompt takes 0.1 s: idle, a short queue, a long one
        trace = rounds(10, 1, every_s=1.0)
        trace += [request(20.0 + i * every_s, trace[i % 10].blocks) for i in range(40)]
        disk = TierSpec(1e9, 2e6, 1e9)
        # Pages of one block, so that whatever was read counts.
        result = run(trace, host=host(4), disk=disk, chunked_prefill_tokens=100)
        hits.append(result.token_hit_ratio_by_tier["disk"])
    assert hits[0] == 0.0
    assert 0.0 < hits[1] <= hits[2]
