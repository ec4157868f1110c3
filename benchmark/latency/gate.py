"""Simulated: time for all agents' sessions with and without the session gate, and chat beside them.

    python benchmark/latency/gate.py [SEED ...]

``ratio`` x ``fit`` sessions of 7 to 9 turns begin within two seconds, where ``fit`` of them fit on
the device; each turn follows its answer after a pause. No request has a name, a label or a stated
tool call; beside people, agents send tools and their results. Qwen2.5-7B's profile on an H100. Both
arms have ``auto``'s eviction and order.
"""

from __future__ import annotations

import itertools
import math
import random
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
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
AUTO = {"schedule_policy": "bounded-shortest", "device_policy": "wa"}


@dataclass(frozen=True, slots=True)
class GateRegime:
    context: int
    """Mean length of a session, in tokens."""
    pause_s: float
    """Median pause of an agent."""
    fit: float = 4.2
    ratio: float = 4.0
    people: int = 0
    """Conversations beside the agents; their pauses have a median of a minute."""
    seed: int = 1


REGIMES = (
    *(GateRegime(*pair) for pair in itertools.product((4_000, 16_000, 64_000), (0.6, 3.0, 10.0))),
    *(GateRegime(*pair, fit=12.0) for pair in itertools.product((4_000, 16_000), (0.6, 3.0))),
    GateRegime(64_000, 3.0, fit=12.0),
    GateRegime(16_000, 0.6, ratio=16.0),
    GateRegime(64_000, 0.6, people=100),
    GateRegime(16_000, 0.6, fit=12.0, people=100),
)


def make_trace(regime: GateRegime) -> Iterator[TraceRequest]:
    """Yield the requests, session by session."""
    rng, blocks = random.Random(regime.seed), itertools.count(1)
    agent_count = int(regime.ratio * regime.fit)
    for session in range(agent_count + regime.people):
        is_agent = session < agent_count
        turns = rng.randint(7, 9)
        time_s = rng.uniform(0.0, 2.0 if is_agent else 200.0)
        median_s, cap_s = (regime.pause_s, 20.0) if is_agent else (60.0, 300.0)
        length = regime.context * rng.uniform(1 / 1.3, 1.3) if is_agent else rng.uniform(1e3, 4e3)
        tokens, path = int(length / 2), list[int]()
        for turn in range(turns):
            missing = max(0, -(-tokens // BLOCK_TOKENS) - len(path))
            path += itertools.islice(blocks, missing)
            think_s = min(cap_s, rng.lognormvariate(math.log(median_s), 0.6)) if turn else None
            time_s += think_s or 0.0
            output = rng.randint(30, 60)
            name = f"{'agent' if is_agent else 'person'} {session}"
            tools = "-tools" + "-after-tool" * (turn > 0) if is_agent and regime.people else ""
            yield TraceRequest(
                *(time_s, tokens, output, tuple(path), BLOCK_TOKENS, f"chat{tools}"),
                *(turn + 1, name, "end", name, think_s),
            )
            tokens += int(length / turns / (1 if is_agent else 2))


class Unlabelled(Workload):
    """Requests as an unmodified client sends them."""

    def request(self, index: int) -> Any:
        request, *rest = super().request(index)
        unlabelled = request.copy(stop="end", tenant=None, conversation=None)
        return (unlabelled, *rest)


def run_arm(regime: GateRegime, gate: str) -> dict[str, Any]:
    """Return the result of one arm."""
    gates = list[FootprintGate]()

    def make_watched(*arguments: Any, **settings: Any) -> FootprintGate:
        gates.append(FootprintGate(*arguments, **settings))
        return gates[-1]

    SESSION_GATES["watched"] = make_watched
    requests = sorted(make_trace(regime), key=lambda request: request.time_s)
    workload = Unlabelled(requests, logged_times=True)
    pool = int(regime.fit * regime.context)
    config = SystemConfig(device_tokens=pool, session_gate=gate, **AUTO)  # type: ignore[arg-type]
    profile = load_profile("qwen2.5-7b-h100")
    result = simulate_system(workload, config, profile, arrivals=ClosedLoop(workload))
    agents = np.array([request.user.startswith("agent") for request in requests])  # type: ignore[union-attr]
    end_s = result.due_s + result.e2e_s
    row = {
        "agents_s": float(end_s[agents].max()),
        "hits": result.token_hit_ratio,
        "agents_ttft_s": mean_and_p99(result.ttft_s[agents]),
        "people_ttft_s": mean_and_p99(result.ttft_s[~agents]) if regime.people else None,
    }
    if gates:
        stats = gates[-1].gate.stats()
        row |= {key: stats[key] for key in ("times_activated", "ineffective_activations", "pauses")}
    return row


def mean_and_p99(values: Any) -> dict[str, float]:
    return {"mean": float(values.mean()), "p99": float(np.percentile(values, 99))}


def main() -> None:
    rows = []
    seeds = [int(word) for word in sys.argv[1:]] or [1, 2, 3]
    for regime in (replace(r, seed=seed) for seed in seeds for r in REGIMES):
        ungated, gated = run_arm(regime, "none"), run_arm(regime, "watched")
        time_ratio = gated["agents_s"] / ungated["agents_s"]
        rows.append(
            {**asdict(regime), "time_ratio": time_ratio, "auto": ungated, "auto and gate": gated}
        )
        print(regime, f"{time_ratio:.3f}", gated, ungated, flush=True)
    write(RESULT_FILE, {"kind": "simulated", "rows": rows})


if __name__ == "__main__":
    main()
