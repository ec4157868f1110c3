"""The session gate in the simulator: a gain under pressure."""

import itertools

from canopy_lab.sim.system import SystemConfig, Workload, simulate_system
from canopy_lab.sim.system.arrivals import ClosedLoop
from support.systems import profile, request

TURNS, FIRST_BLOCKS, TURN_BLOCKS = 8, 20, 4
"""Turns of a session, blocks of its first prompt, blocks that each turn adds."""


def agent_workload(sessions: int) -> Workload:
    """Return sessions of equal growth, one after the other in the trace."""
    trace, blocks = [], itertools.count(1)
    for session in range(sessions):
        path: list[int] = []
        for turn in range(TURNS):
            path += itertools.islice(blocks, TURN_BLOCKS if path else FIRST_BLOCKS)
            time_s = session + turn * 0.1
            trace.append(request(time_s, tuple(path), conversation=f"s{session}", stop="tool"))
    return Workload(sorted(trace, key=lambda sent: sent.time_s), logged_times=True)


def run(workload: Workload, gate: str, device_tokens: int):
    config = SystemConfig(device_tokens=device_tokens, quantum_tokens=1, session_gate=gate)
    loop = ClosedLoop(workload, sessions_per_hour=20_000, think_cap_s=2.0, seed=3)
    return simulate_system(workload, config, profile(), arrivals=loop)


def test_when_sessions_thrash_the_gate_doubles_the_hit_ratio():
    workload = agent_workload(60)
    device_tokens = 4 * (FIRST_BLOCKS + TURNS * TURN_BLOCKS) * 10
    ungated, gated = (run(workload, gate, device_tokens) for gate in ("none", "footprint"))
    assert gated.token_hit_ratio > 2 * ungated.token_hit_ratio
    assert gated.makespan_s < ungated.makespan_s
    assert gated.requests == ungated.requests == 60 * TURNS
