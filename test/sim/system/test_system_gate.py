"""The session gate in the simulator: no effect without pressure, a gain under pressure."""

import itertools

import numpy as np

from canopy_lab.sim.system import SystemConfig, Workload, simulate_system
from canopy_lab.sim.system.arrivals import ClosedLoop
from support.systems import profile, request

TURNS, FIRST, MORE = 8, 20, 4
"""Turns of a session, blocks of its first prompt, blocks that each turn adds."""


def agents(sessions: int, stop: str = "tool", pause: float = 0.1) -> Workload:
    """Sessions of equal growth, one after the other in the trace."""
    trace, blocks = [], itertools.count(1)
    for session in range(sessions):
        path: list[int] = []
        for turn in range(TURNS):
            path += itertools.islice(blocks, MORE if path else FIRST)
            time = session + turn * pause
            trace.append(request(time, tuple(path), conversation=f"s{session}", stop=stop))
    return Workload(sorted(trace, key=lambda r: r.time_s), keep_stamps=True)


def run(workload: Workload, gate: str, device_tokens: int, per_hour: float, cap_s=2.0, **settings):
    config = SystemConfig(
        device_tokens=device_tokens,
        quantum_tokens=1,
        session_gate=gate,
        session_gate_config=settings,
    )
    loop = ClosedLoop(workload, sessions_per_hour=per_hour, think_cap_s=cap_s, seed=3)
    return simulate_system(workload, config, profile(), arrivals=loop)


def test_below_pressure_every_decision_and_every_time_is_as_without_a_gate():
    workload = agents(20)
    open_, gated = (run(workload, gate, 100_000, 2000) for gate in ("none", "footprint"))
    assert np.array_equal(open_.ttft_s, gated.ttft_s)
    assert np.array_equal(open_.e2e_s, gated.e2e_s)
    assert np.array_equal(open_.cached_tokens, gated.cached_tokens)


def test_past_the_cliff_admitted_sessions_find_their_prefixes():
    workload = agents(60)
    device = 4 * (FIRST + TURNS * MORE) * 10
    open_, gated = (run(workload, gate, device, 20_000) for gate in ("none", "footprint"))
    assert gated.token_hit_ratio > 2 * open_.token_hit_ratio
    assert gated.makespan_s < open_.makespan_s
    assert gated.requests == open_.requests == 60 * TURNS


def test_chats_are_served_as_without_a_gate_past_the_cliff():
    workload = agents(60, stop="end", pause=60.0)
    device = 4 * (FIRST + TURNS * MORE) * 10
    open_, gated = (run(workload, gate, device, 20_000, 60.0) for gate in ("none", "footprint"))
    assert np.array_equal(open_.ttft_s, gated.ttft_s)
    assert np.array_equal(open_.cached_tokens, gated.cached_tokens)
