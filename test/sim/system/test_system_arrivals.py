"""Arrival times, and the times that policies receive: stamps, waiting turns, closed loops."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from canopy_lab.sim.system import SystemConfig, Workload, run, simulate_system
from canopy_lab.sim.system.arrivals import ClosedLoop, OpenLoop, TurnsWait
from canopy_lab.sim.system.workload import spread_rounded
from canopy_lab.trace.sessions import turn_links
from sglang_canopy.errors import CanopyError
from sglang_canopy.policy.registry import make_policy
from support.systems import profile, request


def received_times(monkeypatch, trace, **options) -> list[float]:
    """Return the times that the device's policy receives."""
    times_s: list[float] = []

    def make_recording_policy(name, config):
        policy = make_policy(name, config)
        original_arrive = policy.arrive
        policy.arrive = lambda request: times_s.append(request.time) or original_arrive(request)
        return policy

    monkeypatch.setattr(run, "make_policy", make_recording_policy)
    simulate_system(trace, SystemConfig(device_tokens=10_000), profile(), **options)
    return times_s


def test_policies_receive_the_arrival_time_of_a_waiting_turn(monkeypatch):
    first = request(0.0, range(1, 11), output_tokens=101, conversation="a")  # answered at 1.1 s
    other_request = request(1.0, range(101, 111))
    second_turn = request(0.5, range(1, 21), conversation="a", turn=2)
    trace = Workload([first, second_turn, other_request])
    times_s = received_times(monkeypatch, trace, arrivals=TurnsWait(trace))
    assert times_s == pytest.approx([0.0, 1.0, 1.2])  # the other request's prefill is in between
    assert times_s == sorted(times_s)


def test_requests_with_equal_logged_times_are_spread_until_the_next_time():
    trace = [request(3.0 * (i // 8), (i + 1,)) for i in range(40)]
    spread_trace = Workload(trace)
    gaps = [b - a for a, b in zip(spread_trace.times_s, spread_trace.times_s[1:], strict=False)]
    assert max(gaps) < 2.9
    burst_trace = Workload(trace, logged_times=True)
    assert list(burst_trace.times_s) == pytest.approx([sent.time_s for sent in trace])
    config = SystemConfig(device_tokens=10_000)
    costs = profile(token_s=0.02)
    burst_ttft_s = simulate_system(burst_trace, config, costs).mean_ttft_s
    assert simulate_system(spread_trace, config, costs).mean_ttft_s < 0.7 * burst_ttft_s


@given(
    groups=st.lists(st.tuples(st.floats(0.1, 50), st.integers(1, 6)), min_size=1, max_size=30),
    seed=st.integers(0, 99),
)
def test_spreading_keeps_order_and_stays_inside_the_interval(groups, seed):
    times_s, now_s = [], 0.0
    for gap_s, count in groups:
        times_s += [now_s] * count
        now_s += gap_s
    spread_times = spread_rounded(times_s, seed)
    assert spread_times == sorted(spread_times)
    assert spread_times == spread_rounded(times_s, seed)
    for logged, spread_time in zip(times_s, spread_times, strict=True):
        next_logged = min((later for later in times_s if later > logged), default=float("inf"))
        assert logged <= spread_time <= next_logged
    if all(count == 1 for _, count in groups):
        assert spread_times == times_s


def agent_turns(start_s: float, name: str, first_block: int, gaps_s: list[float], **fields):
    """Return turns of a session, each with ten tokens more than the one before it."""
    turns, time_s = [], start_s
    for turn, gap_s in enumerate([0.0, *gaps_s], 1):
        time_s += gap_s
        path = range(first_block, first_block + turn)
        turns.append(request(time_s, path, conversation=name, turn=turn, **fields))
    return turns


def test_in_a_closed_loop_a_turn_follows_the_answer_and_the_time_to_think():
    trace = agent_turns(0.0, "a", 1, [2.0, 500.0])
    workload = Workload(trace)
    config = SystemConfig(device_tokens=10_000)
    result = simulate_system(workload, config, profile(), arrivals=ClosedLoop(workload))
    # Answers take 10 ms for ten new tokens; ten more are cached each time.
    second_answer_s = 0.01 + 2.0 + 0.01
    assert result.makespan_s == pytest.approx(second_answer_s + 120.0 + 0.01, abs=1e-3)
    uncapped = ClosedLoop(workload, think_cap_s=None)
    assert uncapped.following_requests(1, 10.0) == [(pytest.approx(510.0), 2)]


def test_the_think_time_is_the_traces_own_if_it_has_one():
    workload = Workload(agent_turns(0.0, "a", 1, [9.0], think_s=3.0))
    assert ClosedLoop(workload).following_requests(0, 50.0) == [(53.0, 1)]


def test_sub_agents_follow_the_turn_of_their_parent():
    parent = agent_turns(0.0, "a", 1, [10.0])
    child = agent_turns(4.0, "a/1", 101, [1.0])
    workload = Workload(sorted([*parent, *child], key=lambda request: request.time_s))
    loop = ClosedLoop(workload)
    assert [index for _, index in loop.first_requests()] == [0]
    assert sorted(index for _, index in loop.following_requests(0, 100.0)) == [1, 3]
    assert {i: time_s for time_s, i in loop.following_requests(0, 100.0)}[1] == pytest.approx(104.0)
    assert turn_links(workload.trace).session_start == [0, 0, 0, 0]


def test_sessions_begin_at_the_given_rate():
    trace = [request(0.001 * i, (i + 1,), conversation=str(i)) for i in range(2000)]
    starts = ClosedLoop(Workload(trace), sessions_per_hour=7200, seed=3).first_requests()
    assert [i for _, i in starts] == list(range(2000))
    assert starts[-1][0] == pytest.approx(1000, rel=0.1)


def test_an_open_loop_with_doubled_intervals_takes_twice_as_long():
    trace = [request(1.0 * i, (i + 1,)) for i in range(10)]
    workload = Workload(trace)
    slow_run = simulate_system(
        workload, SystemConfig(device_tokens=1000), profile(), arrivals=OpenLoop(workload, 2.0)
    )
    assert slow_run.makespan_s == pytest.approx(18.01)


@pytest.mark.parametrize(
    ("options", "message"),
    [({"sessions_per_hour": 0.0}, "above 0"), ({"think_cap_s": -1.0}, "0 or more")],
)
def test_rates_and_caps_are_checked(options, message):
    with pytest.raises(CanopyError, match=message):
        ClosedLoop(Workload([request(0.0, (1,))]), **options)
