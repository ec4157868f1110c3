"""Group TTLs on a disk, judged on requests that they were not learnt from.

    python benchmark/plan/held_out.py --data DATA --requests 3000

Each workload is served whole on one instance with little DRAM and a disk; hits and TTFT are those
of its second half. The disk's TTLs: none; by group, learnt from the first half (as in a plan made from
yesterday's log); by group, learnt from the whole trace (as in the planner's evaluation); and the single
TTL of ``--fixed`` with the most hits. Requests wait for their prefetch
(``wait_complete``).
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import numpy as np
from workloads import Workload, add_arguments, chosen, work_of

from canopy_lab.plan.groups import observe
from canopy_lab.plan.planner import footprint
from canopy_lab.plan.prices import GIB
from canopy_lab.plan.sizes import sizes
from canopy_lab.plan.space import GROUP, Configuration
from canopy_lab.plan.system import system_of
from canopy_lab.plan.worker import PlanInputs
from canopy_lab.report.table import text_table
from canopy_lab.sim.system import Workload as Served
from canopy_lab.sim.system import simulate_system

_HEAD = (
    "workload", "requests", "disk", "TTL", "hits, second half", "mean TTFT s", "on the disk, mean",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Outcome:
    """Results of a workload's second half."""

    ttl: str
    hits: float
    mean_ttft_s: float
    disk_gib: float
    """On average, over the whole trace."""


def judged(
    work: PlanInputs, share: float, disk_class: str, fixed: list[float]
) -> tuple[float, list[Outcome]]:
    """The disk's size in GiB and an outcome for each kind of TTL."""
    trace, half = work.trace, len(work.trace) // 2
    distinct = footprint(trace, work.engine)
    configuration = Configuration(
        dram_gib=sizes(distinct / 32, 1)[-1],
        disk=disk_class,
        disk_gib=distinct * share,
        disk_mib_s=1000.0,
    )
    kv = work.engine.profile.kv_bytes_per_token
    first, whole = (
        observe(part, work.hash).table(configuration.disk_gib * GIB, kv)
        for part in (islice(trace, half), trace)
    )
    served = Served(trace)
    prompts = np.array([max(r.input_tokens, 1) for r in trace])

    def outcome(name: str, ttl: Any) -> Outcome:
        table = None if ttl is None or isinstance(ttl, float) else ttl
        chosen = replace(configuration, ttl=ttl if table is None else GROUP)
        config = system_of(chosen, work.engine, work.prices, work.policy_configs, table)
        # Else the disk is read only while requests queue, and there is little to tell apart.
        config = replace(config, prefetch_policy="wait_complete")
        result = simulate_system(served, config, work.engine.profile)
        return Outcome(
            name,
            float(result.cached_tokens[half:].sum() / prompts[half:].sum()),
            float(result.ttft_s[half:].mean()),
            result.mean_bytes_by_tier["disk"] / GIB,
        )

    alike = [outcome(f"{ttl:g} s for all", ttl) for ttl in fixed]
    return configuration.disk_gib, [
        outcome("none", None),
        max(alike, key=lambda o: o.hits),
        outcome(f"groups of the first half ({len(first.groups)})", first),
        outcome(f"groups of the whole trace ({len(whole.groups)})", whole),
    ]


def run(workload: Workload, args: argparse.Namespace) -> list[list[str]]:
    """The rows of one workload."""
    work = work_of(workload, args)
    rows = []
    for share in args.shares:
        disk_gib, outcomes = judged(work, share, args.disk, args.fixed)
        for o in outcomes:
            rows.append(
                [
                    workload.name,
                    str(len(work.trace)),
                    f"{disk_gib:.1f} GiB ({100 * share:g} %)",
                    o.ttl,
                    f"{100 * o.hits:.2f} %",
                    f"{o.mean_ttft_s:.3f}",
                    f"{o.disk_gib:.1f} GiB",
                ]
            )
    return rows


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    add_arguments(parser)
    parser.add_argument("--shares", type=_numbers, default="0.05,0.2", help="of the distinct KV")
    parser.add_argument("--disk", default="gp3", help="class of the price list")
    parser.add_argument(
        "--fixed", type=_numbers, default="60,300,900", help="TTLs for all, seconds"
    )
    args = parser.parse_args()
    rows: list[list[str]] = []
    for workload in chosen(args):
        rows += run(workload, args)
        print(text_table(_HEAD, rows), flush=True)
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1) + "\n")


def _numbers(text: str) -> list[float]:
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected numbers, got {text!r}") from None


if __name__ == "__main__":
    main()
