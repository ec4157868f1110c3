"""When to copy to the host: TTFT and hits of every write policy, simulated.

    python benchmark/latency/copies.py --trace conversation_first60.jsonl --out results/copies.json

Each arm serves the same requests of the Mooncake conversation trace, at shares of the rate that
LRU without a host sustains, with hosts of one, two and four times the device. ``copy_ahead`` is
``--hicache-write-policy write_back --canopy-copy-ahead auto`` over the link of the profile; its
placebo copies as many tokens of random leaves; ``free copies`` is ``write_back`` over a link that
takes no time, the limit; ``no host`` is what a host in ``buffer_only`` mode is without a disk.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from canopy_lab.sim.system import SystemConfig, Workload, load_profile, simulate_system
from canopy_lab.sim.system.arrivals import OpenLoop
from canopy_lab.sim.system.engine_profile import EngineProfile
from canopy_lab.trace.open import open_trace

SHARES = (0.8, 0.95)
HOSTS = (1, 2, 4)
POLICIES = ("lru", "wa")
WAITING = "awaited"
"""What the results were made with: ``--canopy-protect-waiting off``."""
LEFT_OUT = 0.2
"""Share of the requests, the first, that only fill the tiers."""
ARMS: dict[str, dict[str, Any]] = {
    "write_through": {"write_policy": "write_through"},
    "write_through_selective": {"write_policy": "write_through_selective"},
    "write_back": {"write_policy": "write_back"},
    "copy_ahead": {"write_policy": "copy_ahead"},
    "copy_ahead, rank strictly": {
        "write_policy": "copy_ahead",
        "write_policy_config": {"pass_over": False},
    },
    "placebo: random leaves": {
        "write_policy": "copy_ahead",
        "write_policy_config": {"at_random": True},
    },
    "free copies": {"write_policy": "write_back"},
}


def saturation(work: Workload, profile: EngineProfile, device: int) -> float:
    """Requests a second of LRU without a host when all come at once."""
    config = SystemConfig(device_tokens=device, device_policy="lru", waiting_prefixes=WAITING)
    result = simulate_system(work, config, profile, arrivals=OpenLoop(work, 1e-9))
    return result.requests / result.makespan_s


def config_of(arm: str, policy: str, device: int, times: int, profile: EngineProfile):
    """The system of one arm; ``times``: the host's size over the device's."""
    config = SystemConfig(device_tokens=device, device_policy=policy, waiting_prefixes=WAITING)
    if arm == "no host":
        return config
    host = profile.host_tier(times * device * profile.kv_bytes_per_token, policy=policy)
    if arm == "free copies":
        host = replace(host, write_bytes_per_s=1e15, latency_s=0.0)
    return replace(config, host=host, **ARMS[arm])


def measured(work: Workload, config: SystemConfig, profile: EngineProfile, stretch: float) -> dict:
    """Hits in percent of the prompt tokens and TTFT in seconds, after the first requests."""
    result = simulate_system(work, config, profile, arrivals=OpenLoop(work, stretch))
    ttft = result.ttft_s[int(LEFT_OUT * len(result.ttft_s)) :]
    return {
        "hits_percent": 100 * result.token_hit_ratio,
        "mean_ttft_s": float(np.mean(ttft)),
        "p99_ttft_s": float(np.percentile(ttft, 99)),
        "copied_gb": result.host_written_bytes / 1e9,
    }


def cells(works: list[Workload], args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    profile = load_profile(args.profile)
    for half, work in enumerate(works):
        if args.half is not None and half != args.half:
            continue
        rate = saturation(work, profile, args.device_tokens)
        span = work.times[-1] - work.times[0]
        for share in SHARES if args.load is None else (args.load,):
            stretch = len(work) / (share * rate) / span
            for policy in POLICIES if args.policy is None else (args.policy,):
                for times in (0, *HOSTS):
                    for arm in ARMS if times else ("no host",):
                        config = config_of(arm, policy, args.device_tokens, times, profile)
                        yield {
                            "half": half,
                            "load": share,
                            "policy": policy,
                            "host": times,
                            "arm": arm,
                            **measured(work, config, profile, stretch),
                        }


def table(rows: list[dict[str, Any]]) -> str:
    """Against ``write_through`` of the same cell; the geometric mean over the halves."""
    lines = [
        "| host | load | policy | arm | hits, points | mean TTFT, % | P99 TTFT, % | copied, % |",
        "|---|---|---|---|---|---|---|---|",
    ]
    base = {key(r): r for r in rows if r["arm"] == "write_through"}
    groups: dict[tuple, list[dict]] = {}
    for row in rows:
        if row["host"]:
            group = (row["host"], row["load"], row["policy"], row["arm"])
            groups.setdefault(group, []).append(row)
    for (host, load, policy, arm), found in groups.items():
        against = [base[key(row)] for row in found]
        hits = np.mean([r["hits_percent"] - b["hits_percent"] for r, b in zip(found, against)])
        cells = [f"{hits:+.2f}"]
        for name in ("mean_ttft_s", "p99_ttft_s", "copied_gb"):
            logs = [math.log(max(r[name], 1e-9) / b[name]) for r, b in zip(found, against)]
            cells.append(f"{100 * (math.exp(np.mean(logs)) - 1):+.0f}")
        if arm == "write_through":
            cells = [
                f"{np.mean([r['hits_percent'] for r in found]):.2f} %",
                f"{np.mean([r['mean_ttft_s'] for r in found]):.2f} s",
                f"{np.mean([r['p99_ttft_s'] for r in found]):.2f} s",
                f"{np.mean([r['copied_gb'] for r in found]):.0f} GB",
            ]
        lines.append(f"| {host}x | {load:.0%} | {policy} | {arm} | {' | '.join(cells)} |")
    return "\n".join(lines)


def key(row: dict[str, Any]) -> tuple:
    return row["half"], row["load"], row["policy"], row["host"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trace", type=Path, default=Path("conversation_first60.jsonl"))
    parser.add_argument("--format", default="mooncake")
    parser.add_argument("--profile", default="qwen2.5-7b-h100")
    parser.add_argument("--device-tokens", type=int, default=1_000_000)
    parser.add_argument("--requests", type=int, default=2500, help="in each of the two halves")
    parser.add_argument("--half", type=int, choices=(0, 1), help="only this one")
    parser.add_argument("--load", type=float, help="only this share of saturation")
    parser.add_argument("--policy", help="only this one")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--table", type=Path, nargs="+", help="of these results, nothing is run")
    args = parser.parse_args()
    if args.table:
        print(table([row for path in args.table for row in json.loads(path.read_text())]))
        return
    trace = list(open_trace(str(args.trace), args.format))
    works = [Workload(trace[: args.requests]), Workload(trace[-args.requests :])]
    rows = []
    for row in cells(works, args):
        rows.append(row)
        print(json.dumps(row), flush=True)
    print(table(rows))
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(rows, indent=0) + "\n")


if __name__ == "__main__":
    main()
