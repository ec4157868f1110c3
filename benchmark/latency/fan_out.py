"""Requests that come together and share a long prefix: is it computed once, or once for each?

    python benchmark/latency/fan_out.py --shared 500,2000,6000 --branches 8

A session asks one first question and then branches (sub-agents, samples, voters), which come at the
same moment, share ``--shared`` tokens that nobody has computed and have ``--own`` tokens of their
own. On ``canopy simulate system``'s engine, load as a share of first come, first served's
saturation.
"""

from __future__ import annotations

import argparse
import random
import sys

from canopy_lab.sim.system import SystemConfig, Workload, load_profile
from canopy_lab.sim.system.loads import LoadedSystem
from canopy_lab.trace.record import TraceRequest

BLOCK = 64
ORDERS = {
    "fcfs": {},
    "hrrn": {"schedule_policy": "hrrn"},
    "bounded-shortest, none deferred": {
        "schedule_policy": "bounded-shortest",
        "schedule_policy_config": {"defer": False},
    },
    "bounded-shortest": {"schedule_policy": "bounded-shortest"},
}


def trace(groups: int, branches: int, shared: int, own: int, seed: int) -> list[TraceRequest]:
    """Groups of ``branches`` at one moment, as a Poisson process; a lone request beside each."""
    draw, made, time_s, block = random.Random(seed), [], 0.0, 0

    def fresh(tokens: int) -> tuple[int, ...]:
        nonlocal block
        block += tokens // BLOCK
        return tuple(range(block - tokens // BLOCK, block))

    for _ in range(groups):
        time_s += draw.expovariate(1.0)
        prefix = fresh(shared)
        sizes = [draw.randrange(own // 2, 2 * own) for _ in range(branches)]
        asked = [(time_s, (*prefix, *fresh(size)), shared + size) for size in sizes]
        alone = draw.randrange(own, 2 * shared)
        asked.append((time_s + draw.expovariate(2.0), fresh(alone), alone))
        made += [TraceRequest(at, tokens, 100, path, BLOCK) for at, path, tokens in asked]
    return sorted(made, key=lambda request: request.time_s)


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--profile", default="qwen2.5-7b-h100")
    parser.add_argument("--shared", type=_numbers, default="500,2000,6000")
    parser.add_argument("--own", type=int, default=300)
    parser.add_argument("--branches", type=int, default=8)
    parser.add_argument("--groups", type=int, default=150)
    parser.add_argument("--loads", type=lambda t: [*map(float, t.split(","))], default="0.5,0.8,1")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    profile = load_profile(args.profile)
    print("| shared | load | order | mean TTFT, s | P99 | hits |\n|---:|---:|---|---:|---:|---:|")
    for shared in args.shared:
        made = trace(args.groups, args.branches, shared, args.own, args.seed)
        work = Workload(made, keep_stamps=True)

        def system(config: dict) -> LoadedSystem:
            settings = SystemConfig(device_tokens=1_000_000, **config)
            return LoadedSystem(work, settings, profile, loop="open", keep_stamps=True)  # noqa: B023

        most = system({}).saturation(args.seed)
        for load in args.loads:
            for name, config in ORDERS.items():
                run = system(config).at(load * most, args.seed)
                ttft = run.latency.ttft_s
                print(
                    f"| {shared} | {load:.0%} | {name} | {ttft.mean:.3f} | {ttft.p99:.2f} "
                    f"| {run.system.token_hit_ratio:.1%} |",
                    flush=True,
                )
    return 0


def _numbers(text: str) -> list[int]:
    return [int(n) for n in text.split(",")]


if __name__ == "__main__":
    sys.exit(main())
