"""Simulated: time for all agents' sessions with and without the session gate, and chat beside them.

    python benchmark/latency/gate.py [SEED ...]

Agents' sessions of 7 to 9 turns begin within two seconds, several times as many as fit on the device;
each turn follows the previous answer after a pause. Requests name no tenant and no conversation; beside
people, agents send tools and their results. The profile is Qwen2.5-7B on an H100. Both arms have
``auto``'s eviction and order. Writes results/gate_regimes.json.
"""

from __future__ import annotations

import itertools
import math
import random
import sys
from collections.abc import Iterator
from dataclasses import astuple, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from canopy_lab.sim.system import SystemConfig, Workload, load_profile, simulate_system
from canopy_lab.sim.system.arrivals import ClosedLoop
from canopy_lab.sim.system.gate import SESSION_GATES, FootprintGate
from canopy_lab.trace.record import TraceRequest

sys.path.insert(0, str(Path(__file__).parents[1]))
from result_file import write

RESULT_FILE = Path(__file__).parent / "results" / "gate_regimes.json"
BLOCK_TOKENS = 64
AUTO_SETTINGS = {"schedule_policy": "bounded-shortest", "device_policy": "wa"}


@dataclass(frozen=True, slots=True)
class GateRegime:
    session_tokens: int
    """Typical length of a whole session."""
    pause_s: float
    """Median pause of an agent between an answer and its next turn."""
    fitting_sessions: float = 4.2
    """Sessions of ``session_tokens`` that the device holds."""
    oversubscription: float = 4.0
    """Agents' sessions, as a multiple of those that fit."""
    people: int = 0
    """Conversations beside the agents; their pauses have a median of a minute."""
    seed: int = 1

    def reported(self) -> dict[str, Any]:
        """Return the fields under their names in the result file."""
        names = ("context", "pause_s", "fit", "ratio", "people", "seed")
        return dict(zip(names, astuple(self), strict=True))


REGIMES = (
    *(GateRegime(*pair) for pair in itertools.product((4_000, 16_000, 64_000), (0.6, 3.0, 10.0))),
    *(
        GateRegime(*pair, fitting_sessions=12.0)
        for pair in itertools.product((4_000, 16_000), (0.6, 3.0))
    ),
    GateRegime(64_000, 3.0, fitting_sessions=12.0),
    GateRegime(16_000, 0.6, oversubscription=16.0),
    GateRegime(64_000, 0.6, people=100),
    GateRegime(16_000, 0.6, fitting_sessions=12.0, people=100),
)


def make_trace(regime: GateRegime) -> Iterator[TraceRequest]:
    """Yield the requests, session by session."""
    rng, block_ids = random.Random(regime.seed), itertools.count(1)
    agent_count = int(regime.oversubscription * regime.fitting_sessions)
    for session in range(agent_count + regime.people):
        is_agent = session < agent_count
        turns = rng.randint(7, 9)
        time_s = rng.uniform(0.0, 2.0 if is_agent else 200.0)
        median_pause_s, max_pause_s = (regime.pause_s, 20.0) if is_agent else (60.0, 300.0)
        if is_agent:
            session_tokens = regime.session_tokens * rng.uniform(1 / 1.3, 1.3)
        else:
            session_tokens = rng.uniform(1e3, 4e3)
        prompt_tokens, prompt_blocks = int(session_tokens / 2), list[int]()
        for turn in range(turns):
            new_blocks = max(0, -(-prompt_tokens // BLOCK_TOKENS) - len(prompt_blocks))
            prompt_blocks += itertools.islice(block_ids, new_blocks)
            pause_s = rng.lognormvariate(math.log(median_pause_s), 0.6) if turn else None
            think_s = None if pause_s is None else min(max_pause_s, pause_s)
            time_s += think_s or 0.0
            output_tokens = rng.randint(30, 60)
            name = f"{'agent' if is_agent else 'person'} {session}"
            tools = "-tools" + "-after-tool" * (turn > 0) if is_agent and regime.people else ""
            yield TraceRequest(
                *(time_s, prompt_tokens, output_tokens, tuple(prompt_blocks), BLOCK_TOKENS),
                f"chat{tools}",
                *(turn + 1, name, "end", name, think_s),
            )
            prompt_tokens += int(session_tokens / turns / (1 if is_agent else 2))


class Unlabelled(Workload):
    """Requests as an unmodified client sends them."""

    def request(self, index: int) -> Any:
        request, *rest = super().request(index)
        unlabelled = request.copy(stop="end", tenant=None, conversation=None)
        return (unlabelled, *rest)


def run_arm(regime: GateRegime, gate: str) -> dict[str, Any]:
    """Simulate a regime under a gate, ``none`` or ``watched``; return its figures."""
    gates = list[FootprintGate]()

    def make_watched(*arguments: Any, **settings: Any) -> FootprintGate:
        gates.append(FootprintGate(*arguments, **settings))
        return gates[-1]

    SESSION_GATES["watched"] = make_watched
    requests = sorted(make_trace(regime), key=lambda request: request.time_s)
    workload = Unlabelled(requests, logged_times=True)
    pool_tokens = int(regime.fitting_sessions * regime.session_tokens)
    config = SystemConfig(device_tokens=pool_tokens, session_gate=gate, **AUTO_SETTINGS)  # type: ignore[arg-type]
    profile = load_profile("qwen2.5-7b-h100")
    result = simulate_system(workload, config, profile, arrivals=ClosedLoop(workload))
    is_agent = np.array([request.user.startswith("agent") for request in requests])  # type: ignore[union-attr]
    end_s = result.due_s + result.e2e_s
    row = {
        "agents_s": float(end_s[is_agent].max()),
        "hits": result.token_hit_ratio,
        "agents_ttft_s": mean_and_p99(result.ttft_s[is_agent]),
        "people_ttft_s": mean_and_p99(result.ttft_s[~is_agent]) if regime.people else None,
    }
    if gates:
        stats = gates[-1].gate.stats()
        row |= {key: stats[key] for key in ("times_activated", "ineffective_activations", "pauses")}
    return row


def mean_and_p99(ttft_s: np.ndarray) -> dict[str, float]:
    return {"mean": float(ttft_s.mean()), "p99": float(np.percentile(ttft_s, 99))}


def main() -> None:
    rows = []
    seeds = [int(argument) for argument in sys.argv[1:]] or [1, 2, 3]
    for regime in (replace(r, seed=seed) for seed in seeds for r in REGIMES):
        ungated, gated = run_arm(regime, "none"), run_arm(regime, "watched")
        time_ratio = gated["agents_s"] / ungated["agents_s"]
        arms = {"auto": ungated, "auto and gate": gated}
        rows.append({**regime.reported(), "time_ratio": time_ratio, **arms})
        print(regime, f"{time_ratio:.3f}", gated, ungated, flush=True)
    write(RESULT_FILE, {"kind": "simulated", "rows": rows})


if __name__ == "__main__":
    main()
