"""The session gate in the simulator: a gain under pressure."""

import itertools

from canopy_lab.sim.system import SystemConfig, Workload, simulate_system
from canopy_lab.sim.system.arrivals import ClosedLoop
from support.systems import profile, request

TURNS, FIRST, MORE = 8, 20, 4
"""Turns of a session, blocks of its first prompt, blocks that each turn adds."""


def agents(sessions: int) -> Workload:
    """Sessions of equal growth, one after the other in the trace."""
    trace, blocks = [], itertools.count(1)
    for session in range(sessions):
        path: list[int] = []
        for turn in range(TURNS):
            path += itertools.islice(blocks, MORE if path else FIRST)
            time = session + turn * 0.1
            trace.append(request(time, tuple(path), conversation=f"s{session}", stop="tool"))
    return Workload(sorted(trace, key=lambda r: r.time_s), logged_times=True)


def run(workload: Workload, gate: str, device_tokens: int):
    config = SystemConfig(device_tokens=device_tokens, quantum_tokens=1, session_gate=gate)
    loop = ClosedLoop(workload, sessions_per_hour=20_000, think_cap_s=2.0, seed=3)
    return simulate_system(workload, config, profile(), arrivals=loop)


def test_past_the_cliff_admitted_sessions_find_their_prefixes():
    workload = agents(60)
    device = 4 * (FIRST + TURNS * MORE) * 10
    open_, gated = (run(workload, gate, device) for gate in ("none", "footprint"))
    assert gated.token_hit_ratio > 2 * open_.token_hit_ratio
    assert gated.makespan_s < open_.makespan_s
    assert gated.requests == open_.requests == 60 * TURNS
