"""A plan that searches on a part of the requests against a plan on all: its choice and its savings.

    python benchmark/plan/sampling.py --data DATA --requests 600 --sample 200

Every configuration of a grid is simulated on all requests and on the busiest part; then the choice is
made from the part and as few simulations of the whole as the margins allow, for limits on P99 and
mean TTFT from strict to loose. It also reports the error of the part, and the processor seconds of both. ``synthetic`` (Mooncake's) and
``azure`` (no block ids: nothing is shared) are additional workloads.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterable
from itertools import islice
from typing import Any

import numpy as np
from workloads import WORKLOADS, add_arguments, work_of

from canopy_lab.plan.choice import choose, configuration_of, parse_constraints
from canopy_lab.plan.confirm import confirm
from canopy_lab.plan.objective import METRICS
from canopy_lab.plan.planner import PlanRequest, footprint, least_size, make_space
from canopy_lab.plan.prices import GIB, load_prices
from canopy_lab.plan.sampled import busiest
from canopy_lab.plan.system import Engine, row_of
from canopy_lab.plan.worker import PlanInputs, SimulationTask, at_load, run_task
from canopy_lab.report.table import text_table
from canopy_lab.sim.compact import CompactTrace
from canopy_lab.sim.system.engine_profile import load_profile
from canopy_lab.trace.open import open_trace

FILES = {
    "synthetic": ("mooncake/synthetic_trace.jsonl", "mooncake", 0.6, 16.0),
    "azure": ("azure/AzureLLMInferenceTrace_code.csv", "azure", 6.0, 16.0),
}
"""Path, format, load and device GiB of workloads that only this benchmark has."""
_HEAD = (
    "workload", "instances", "configurations", "P99 off by, 5 % / median / 95 %", "simulated",
    "same choice", "at most dearer", "all simulated, CPU s", "the part, CPU s",
)  # fmt: skip


def inputs(name: str, args: argparse.Namespace, instances: int) -> PlanInputs:
    """The requests and the engine."""
    if name not in FILES:
        return work_of(next(w for w in WORKLOADS if w.name == name), args, instances)
    path, form, load, device_gib = FILES[name]
    profile = load_profile(args.profile)
    pool = round(device_gib * GIB / profile.kv_bytes_per_token)
    source: Iterable[Any] = open_trace(args.data / path, form)
    trace = CompactTrace(at_load(islice(source, args.requests), load))
    return PlanInputs(trace, Engine(profile, pool, "prefix-aware"), load_prices(args.prices))


def run(name: str, args: argparse.Namespace, instances: int) -> tuple[list[str], dict[str, Any]]:
    """A row of the table, and the figures behind it."""
    work = inputs(name, args, instances)
    request = PlanRequest(
        disks=tuple(args.disks.split(",")), instances=(instances,),
        choices={"page_size": (64,), "prefetch_policy": ("timeout", "wait_complete")},
    )  # fmt: skip
    size, least = footprint(work.trace, work.engine), least_size(work.trace, work.engine)
    some = make_space(request, size, work.prices, least).grid()
    started = time.process_time()
    kv = float(work.engine.profile.kv_bytes_per_token)
    rows = [row_of(c, run_task(work, SimulationTask(c)), work.prices, kv) for c in some]
    real, simulated_s = dict(zip(some, rows)), time.process_time() - started
    started = time.process_time()
    part = work.with_trace(busiest(work.trace, args.sample))
    rough = [row_of(c, run_task(part, SimulationTask(c)), work.prices, kv) for c in some]
    predicted = dict(zip(some, rough))
    predicted_s = time.process_time() - started
    off = [predicted[c]["p99_ttft_s"] / real[c]["p99_ttft_s"] - 1 for c in some]
    found, counts, dearer = 0, [], 0.0
    for limits, wanted in wishes(rows):
        best = choose(rows, limits, wanted)
        mine = confirm(predicted, lambda cs: [real[c] for c in cs], limits, wanted)
        found += configuration_of(best.row) == configuration_of(mine.choice.row)
        sign = -1 if wanted.maximise else 1
        dearer = max(dearer, sign * (mine.choice.row[wanted.key] / best.row[wanted.key] - 1))
        counts.append(len(mine.rows))
    figures = {
        "workload": name, "instances": instances, "requests": len(work.trace),
        "configurations": len(some), "off": off, "simulated": counts, "same": found,
        "dearer": dearer, "simulated_s": simulated_s, "predicted_s": predicted_s,
    }  # fmt: skip
    tails = " / ".join(f"{100 * v:+.1f} %" for v in np.percentile(off, (5, 50, 95)))
    line = [
        name, str(instances), str(len(some)), tails, f"{min(counts)} to {max(counts)}",
        f"{found} of {len(counts)}", f"{100 * dearer:.2f} %", f"{simulated_s:.1f}",
        f"{predicted_s:.1f}",
    ]  # fmt: skip
    return line, figures


def wishes(rows: list[dict[str, Any]]) -> Iterable[tuple[Any, Any]]:
    """Limits from strict to loose, with cost to be least; no limit; and least mean TTFT."""
    p99, mean = ([row[key] for row in rows] for key in ("p99_ttft_s", "mean_ttft_s"))
    for share in (2, 10, 30, 50, 70, 90):
        yield (
            parse_constraints([f"p99_ttft<{np.percentile(p99, share) * 1.0001}s"]),
            METRICS["cost"],
        )
    yield parse_constraints([f"mean_ttft<{np.percentile(mean, 30)}s"]), METRICS["cost"]
    yield (), METRICS["mean_ttft"]
    yield (), METRICS["cost"]


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    add_arguments(parser)
    parser.add_argument("--instances", default="1", help="N,N,...")
    parser.add_argument("--sample", type=int, default=200, help="requests of the part")
    args = parser.parse_args()
    lines, results = [], []
    for name in args.workloads.split(","):
        for instances in map(int, args.instances.split(",")):
            line, figures = run(name, args, instances)
            lines.append(line)
            results.append(figures)
            print(text_table(_HEAD, [line]), flush=True)
    print("\n" + text_table(_HEAD, lines))
    if args.json:
        args.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
