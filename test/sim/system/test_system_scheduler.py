"""Times that can be worked out by hand: prefill, decode, queue, chunks, batches, instances."""

import random
from types import SimpleNamespace

import pytest

from canopy_lab.sim.system import SystemConfig, TierSpec, simulate_system
from canopy_lab.sim.system.routing import KnownPrefixes, Router
from sglang_canopy.errors import CanopyError
from support.systems import profile, request


def run(trace, *, costs=None, **fields):
    fields.setdefault("device_tokens", 100_000)
    return simulate_system(trace, SystemConfig(**fields), costs or profile())


def test_one_request_takes_its_prefill_and_a_step_for_each_further_token():
    result = run([request(5.0, range(1, 11), output_tokens=4)])
    assert result.mean_ttft_s == pytest.approx(0.1)  # 100 tokens of 1 ms
    assert result.mean_e2e_s == pytest.approx(0.1 + 3 * 0.01)
    assert result.mean_tpot_s == pytest.approx(0.01)
    assert result.throughput_tokens_per_s == pytest.approx(104 / 0.13)


HAND_COMPUTED_RUNS = {
    "a cached prefix costs nothing, and the last token is always computed": (
        [request(0.0, range(1, 11)), request(1.0, range(1, 11))],
        {"cached_tokens": [0, 99], "ttft_s": [0.1, 0.001]},
    ),
    "a request that arrives during a prefill waits for its end": (
        [request(0.0, range(1, 11)), request(0.04, range(101, 111))],
        {"ttft_s": [0.1, 0.06 + 0.1], "mean_queue_s": 0.06 / 2},
    ),
    # The first decodes from 0.1 on, steps of 10 ms; the second arrives in the middle of a step.
    "prefill comes first after the running decode step": (
        [request(0.0, range(1, 11), output_tokens=11), request(0.135, range(101, 111))],
        {"ttft_s": [0.1, 0.005 + 0.1], "e2e_s": [0.1 + 10 * 0.01 + 0.1, 0.105]},
    ),
    "requests that wait together are prefilled together": (
        [request(i / 100, range(100 * i + 1, 100 * i + 11)) for i in range(3)],
        {"e2e_s": [0.1, 0.1 - 0.01 + 0.2, 0.1 - 0.02 + 0.2]},
    ),
    "an output is found by the next turn, but for its last token, which has no KV": (
        [
            request(0.0, range(1, 11), output_tokens=21, conversation="a"),
            request(10.0, range(1, 21), conversation="a", turn=2),
        ],
        {"cached_tokens": [0, 120]},
    ),
}


@pytest.mark.parametrize("case", HAND_COMPUTED_RUNS)
def test_times_and_hits_by_hand(case):
    trace, expected = HAND_COMPUTED_RUNS[case]
    result = run(trace)
    for name, values in expected.items():
        assert getattr(result, name) == pytest.approx(values), name


def test_a_long_prompt_is_prefilled_in_chunks_and_a_decode_waits_for_all_of_them():
    trace = [request(0.0, (1,), output_tokens=3), request(0.015, range(101, 131))]
    result = run(trace, chunked_prefill_tokens=100)
    assert result.ttft_s[1] == pytest.approx(0.005 + 0.3)
    assert result.events > run(trace).events


def test_no_more_than_max_running_decode_together():
    trace = [request(0.0, (i,), output_tokens=101) for i in range(1, 5)]
    one_by_one = run(trace, max_running=1)
    assert one_by_one.makespan_s == pytest.approx(4 * (0.01 + 1.0))
    assert run(trace, max_running=4).makespan_s == pytest.approx(4 * 0.01 + 1.0, rel=0.01)


def test_a_request_waits_until_its_prompt_and_output_fit():
    first = request(0.0, range(1, 11), output_tokens=101)
    trace = [first, request(0.01, range(101, 111), output_tokens=101)]
    result = run(trace, device_tokens=250)
    assert result.ttft_s[1] == pytest.approx(0.1 + 1.0 - 0.01 + 0.1)


def test_an_output_without_continuation_stays_until_its_eviction():
    trace = [request(0.0, range(1, 11), output_tokens=100), request(10.0, range(1, 11))]
    result = run(trace)
    assert result.peak_bytes_by_tier["device"] >= 199 * 1000


def test_two_instances_halve_the_makespan():
    trace = [request(0.0, range(i * 10, i * 10 + 10)) for i in range(1, 9)]
    for instances, makespan_s in ((1, 0.8), (2, 0.4)):
        result = run(trace, instances=instances, chunked_prefill_tokens=100)
        assert result.makespan_s == pytest.approx(makespan_s)


def router_of(*request_counts: int) -> Router:
    """Return a router over instances with these numbers of requests."""
    return Router("prefix-aware", [SimpleNamespace(request_count=n) for n in request_counts])  # type: ignore[arg-type]


def test_prefix_aware_routing_prefers_recorded_prefixes_as_sglangs_router():
    # sglang-router 0.3.2 before two servers: prompts that share nothing go where the fewest
    # requests are, to the first of several; a third of a prompt is enough to follow it.
    router = router_of(0, 0)
    assert [router.choose(range(i * 10, i * 10 + 10)) for i in range(1, 5)] == [0] * 4
    router._instances[0].request_count = 1
    assert router.choose(range(100, 110)) == 1
    assert router.choose([*range(10, 14), *range(200, 206)]) == 0
    assert router.choose([*range(20, 23), *range(300, 307)]) == 1


@pytest.mark.parametrize(
    ("first_requests", "other_requests", "chosen"),
    [(64, 0, 0), (65, 0, 1), (200, 134, 0), (300, 200, 0), (301, 200, 1)],
)
def test_prefix_aware_routing_spills_as_sglangs_router(first_requests, other_requests, chosen):
    # The 66th request for one prefix, none of them answered, was the first that sglang-router sent to the other server.
    router = router_of(0, 0)
    assert router.choose(range(10)) == 0
    first, other = router._instances
    first.request_count, other.request_count = first_requests, other_requests
    assert router.choose(range(10)) == chosen


def test_a_router_forgets_only_its_oldest_prefixes():
    prefixes, rng = KnownPrefixes(max_blocks=50), random.Random(1)
    for _ in range(300):
        path_number = rng.randrange(8)
        path = tuple(range(path_number * 100, path_number * 100 + rng.randrange(1, 15)))
        prefixes.record_sent(path, path_number % 3)
        assert prefixes.longest_prefix(path) == (len(path), path_number % 3)
        assert len(prefixes) <= 2 * (50 + 15)
        for start in range(0, 800, 100):  # the recorded blocks of a path are a run from its start
            full_path = tuple(range(start, start + 15))
            blocks, _ = prefixes.longest_prefix(full_path)
            is_recorded = [prefixes._instance_of(block) >= 0 for block in full_path]
            assert is_recorded == [depth < blocks for depth in range(15)]
    prefixes.record_sent(range(2000, 2060), 1)
    prefixes.record_sent(range(3000, 3060), 1)
    assert prefixes.longest_prefix((0, 1, 2)) == (0, -1)


@pytest.mark.parametrize(
    ("trace", "config", "message"),
    [
        ([], {}, "the trace has no requests; give a trace with requests"),
        ([request(1.0, (1,)), request(0.5, (2,))], {}, "sort the trace by arrival time"),
        ([request(0.0, range(1, 50))], {"device_tokens": 100}, "give more, or leave the request"),
        ([request(0.0, (1,)), request(1.0, (2,), block_tokens=20)], {}, "one block size"),
    ],
)
def test_a_mistake_gets_one_line_with_the_remedy(trace, config, message):
    with pytest.raises(CanopyError, match=message) as error:
        run(trace, **config)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"routing": "random"}, "routing"),
        ({"instances": 0}, "instances"),
        ({"write_policy": "never"}, "write_policy"),
        ({"device_policy": "best"}, "best"),
        ({"prefetch_policy": "soon"}, "prefetch_policy"),
        ({"device_tokens": float("nan")}, "device-tokens"),
        ({"disk": TierSpec(100, 1e9, 1e9)}, "give host as well"),
        ({"schedule_policy": "best"}, "must be one of fcfs, lpm, hrrn"),
        ({"session_gate": "wide"}, "must be one of none, footprint"),
        ({"session_gate": "footprint", "session_gate_config": {"doors": 2}}, "does not take"),
    ],
)
def test_a_wrong_setting_is_refused_by_name(settings, message):
    with pytest.raises(CanopyError, match=message):
        SystemConfig(**{"device_tokens": 1000, **settings})
