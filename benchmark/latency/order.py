"""Simulated: the effect of the queue's order, and of protecting waiting requests, on TTFT.

    python benchmark/latency/order.py --data DIR --trace conversation
    python benchmark/latency/order.py --data DIR --trace agentic --sessions-per-hour 30,36,40
    python benchmark/latency/order.py --data DIR --trace conversation --what waiting

Chat is open-loop at shares of saturation (the throughput of LRU under first come, first served, if all
requests arrive at once); agents are closed-loop. Rows are ratios to the first arm of the same policy.
``--what order``: every order, under ``--policy``. ``--what waiting``: cached prefixes of waiting
requests under first come, first served, with random protected paths as the placebo.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import placebos  # noqa: F401

from canopy_lab.sim.system import SystemConfig, simulate_system
from canopy_lab.sim.system.arrivals import ClosedLoop, OpenLoop
from canopy_lab.sim.system.engine_profile import load_profile
from canopy_lab.sim.system.tier_spec import TierSpec
from canopy_lab.sim.system.workload import Workload
from canopy_lab.trace import open_trace

sys.path.append(str(Path(__file__).resolve().parents[1] / "traces"))
from make_overlay import main as make_overlay

WARM_UP = 0.2
"""Share of a run's requests at its start that is ignored."""


@dataclass(frozen=True, slots=True)
class Arm:
    """One row."""

    name: str
    policy: str
    settings: dict[str, Any] = field(default_factory=dict)


def arms(what: str, policies: list[str], factors: list[float]) -> list[Arm]:
    """Return the arms; the first of each policy is its baseline."""
    found = []
    for policy in policies:
        if what == "order":
            names = ["fcfs", "random", "lpm", "hrrn", "shortest-prefill-first", "bounded-shortest"]
            found += [Arm(name, policy, {"schedule_policy": name}) for name in names]
            for factor in factors:
                given = {
                    "schedule_policy": "bounded-shortest",
                    "schedule_policy_config": {"max_wait_factor": factor},
                }
                found.append(Arm(f"bounded-shortest, factor {factor:g}", policy, given))
        else:
            names = ["awaited", "ignored", "touched", "by-place", "random-paths"]
            found += [Arm(name, policy, {"waiting_prefixes": name}) for name in names]
    return found


def workload_of(args: argparse.Namespace) -> Workload:
    """The trace, prepared once a process."""
    if args.trace == "agentic":
        path = args.out / f"overlay-{args.conversations}-{args.seed}.jsonl.gz"
        return Workload(open_trace(path, "agentic"))
    file = {"conversation": "conversation_first60", "synthetic": "synthetic_trace"}[args.trace]
    trace = open_trace(args.data / f"mooncake/{file}.jsonl", "mooncake")
    return Workload(list(itertools.islice(trace, args.skip, args.skip + args.requests)))


_state: dict[str, Any] = {}


def _begin(args: argparse.Namespace) -> None:
    _state["args"] = args
    _state["workload"] = workload_of(args)
    _state["profile"] = load_profile(args.profile)


def _run(arm: Arm, stretch: float | None, rate: float | None) -> dict[str, Any]:
    """One simulation."""
    args, workload = _state["args"], _state["workload"]
    host = {}
    if args.host_tokens:
        size = args.host_tokens * _state["profile"].kv_bytes_per_token
        host = {"host": TierSpec(capacity_bytes=size, **args.host_spec)}
    config = SystemConfig(
        device_tokens=args.device_tokens,
        device_policy=arm.policy,
        **host,
        **{"waiting_prefixes": args.waiting, **arm.settings},
    )
    if rate is not None:
        arrivals: Any = ClosedLoop(workload, sessions_per_hour=rate, seed=args.seed)
    else:
        assert stretch is not None
        arrivals = OpenLoop(workload, stretch)
    began = time.perf_counter()
    result = simulate_system(workload, config, _state["profile"], arrivals=arrivals)
    first = int(WARM_UP * len(workload))
    ttft = result.ttft_s[first:]
    prompts = np.array([workload.request(i)[2] for i in range(first, len(workload))])
    order = np.argsort(prompts, kind="stable")
    tenth = max(1, len(ttft) // 10)
    short, long = ttft[order[:tenth]], ttft[order[-tenth:]]
    return {
        "retracted": result.retracted,
        "mean": float(ttft.mean()),
        "median": float(np.median(ttft)),
        "P95": float(np.percentile(ttft, 95)),
        "P99": float(np.percentile(ttft, 99)),
        "max": float(ttft.max()),
        "shortest decile": float(short.mean()),
        "longest decile": float(long.mean()),
        "longest, P99": float(np.percentile(long, 99)),
        "hits": result.token_hit_ratio,
        "makespan_s": result.makespan_s,
        "seconds": time.perf_counter() - began,
    }


def saturation(args: argparse.Namespace) -> float:
    """Requests per second of the baseline if all requests arrive at once."""
    _begin(args)
    row = _run(Arm("fcfs", "lru"), 1e-6, None)
    return len(_state["workload"]) / row["makespan_s"]


def table(title: str, rows: list[tuple[Arm, dict[str, Any]]]) -> str:
    """One load as Markdown: seconds of the first arm of each policy, changes of the others."""
    names = [
        "mean",
        "median",
        "P95",
        "P99",
        "max",
        "shortest decile",
        "longest decile",
        "longest, P99",
    ]
    lines = [f"\n## {title}\n", f"| policy | arm | {' | '.join(names)} | hits | retracted |"]
    lines.append("|---|---|" + "---:|" * (len(names) + 2))
    base: dict[str, dict[str, Any]] = {}
    for arm, row in rows:
        first = base.setdefault(arm.policy, row)
        if row is first:
            cells = [f"{row[name]:.2f} s" for name in names] + [f"{row['hits']:.1%}"]
        else:
            cells = [f"{100 * (row[n] / first[n] - 1):+.0f} %" for n in names]
            cells.append(f"{100 * (row['hits'] - first['hits']):+.1f}")
        lines.append(f"| {arm.policy} | {arm.name} | {' | '.join(cells)} | {row['retracted']} |")
    return "\n".join(lines)


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, required=True, help="folder with mooncake/, ...")
    parser.add_argument("--out", type=Path, default=Path("/tmp/canopy-order"))
    parser.add_argument("--trace", choices=["conversation", "synthetic", "agentic"], required=True)
    parser.add_argument("--what", choices=["order", "waiting"], default="order")
    parser.add_argument("--policy", type=lambda t: t.split(","), default="lru")
    parser.add_argument("--profile", default="qwen2.5-7b-h100")
    parser.add_argument("--loads", type=_numbers, default="0.6,0.8,0.95,1.1")
    parser.add_argument("--sessions-per-hour", type=_numbers, default="30,36,40")
    parser.add_argument("--factors", type=_numbers, default="1,2", help="other factors of ours")
    parser.add_argument("--requests", type=int, default=4000)
    parser.add_argument("--skip", type=int, default=0)
    parser.add_argument("--device-tokens", type=int, default=1_000_000)
    parser.add_argument("--host-tokens", type=int, default=0)
    parser.add_argument("--host-spec", type=json.loads, default={}, help="JSON of a TierSpec")
    parser.add_argument("--waiting", default="by-place", help="what waiting does, of waiting.py")
    parser.add_argument("--conversations", type=int, default=100)
    parser.add_argument("--window-s", type=float, default=3600)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--processes", type=int, default=1)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    if args.trace == "agentic":
        path = args.out / f"overlay-{args.conversations}-{args.seed}.jsonl.gz"
        if not path.exists():
            given = [
                "--archive",
                args.data / "agentic_coding/traces_500.tar.xz",
                "-o",
                path,
            ]
            given += ["--conversations", args.conversations, "--window-s", args.window_s]
            if make_overlay([*map(str, given), "--seed", str(args.seed)]) != 0:
                return 2
        loads = [(f"{rate:g} sessions an hour", None, rate) for rate in args.sessions_per_hour]
    else:
        most = saturation(args)
        workload = _state["workload"]
        own = len(workload) / (workload.times[-1] - workload.times[0])
        print(f"saturation: {most:.2f} requests/s, {len(workload)} requests")
        loads = [
            (f"{load:.0%} ({load * most:.2f}/s)", own / (load * most), None) for load in args.loads
        ]
    rows = arms(args.what, args.policy, args.factors)
    with ProcessPoolExecutor(args.processes, initializer=_begin, initargs=(args,)) as pool:
        pending = [
            (title, [(arm, pool.submit(_run, arm, stretch, rate)) for arm in rows])
            for title, stretch, rate in loads
        ]
        for title, futures in pending:
            done = [(arm, future.result()) for arm, future in futures]
            print(table(f"{args.trace}, {args.profile}, {title}", done), flush=True)
            print(f"\n{sum(r['seconds'] for _, r in done):.0f} s of simulation", file=sys.stderr)
    return 0


def _numbers(text: str) -> list[float]:
    return [float(n) for n in text.split(",") if n]


if __name__ == "__main__":
    sys.exit(main())
