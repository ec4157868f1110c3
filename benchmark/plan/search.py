"""How much of the full grid's dominated volume the adaptive search finds, and with how little.

Both use the same simulations and the same reference point: the worst of each objective over the
full grid and 5 % beyond. The adaptive search runs first and without the grid's results.
"""

from __future__ import annotations

import argparse
import json
import time

from workloads import add_arguments, chosen, request, work_of

from sglang_canopy.plan.objective import Objectives, Scale
from sglang_canopy.plan.planner import make_plan
from sglang_canopy.report.table import text_table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    add_arguments(parser)
    args = parser.parse_args()
    rows, results = [], []
    for workload in chosen(args):
        work = work_of(workload, args)
        started = time.perf_counter()
        found = make_plan(request(), work, jobs=args.jobs, cache=args.cache)
        adaptive_s = time.perf_counter() - started
        started = time.perf_counter()
        grid = make_plan(request(grid=True), work, jobs=args.jobs, cache=args.cache)
        grid_s = time.perf_counter() - started
        objectives = Objectives.of(found.request.objectives)
        points = objectives.matrix(grid.found.rows.values())
        scale = Scale.of(points)
        whole = scale.hypervolume(points)
        part = scale.hypervolume(objectives.matrix(found.found.rows.values()))
        result = {
            "workload": workload.name,
            "requests": len(work.trace),
            "footprint_gib": found.footprint_gib,
            "adaptive_evaluations": len(found.found.rows),
            "grid_evaluations": len(grid.found.rows),
            "evaluations_share": len(found.found.rows) / len(grid.found.rows),
            "hypervolume_share": part / whole,
            "front_adaptive": len(found.front),
            "front_grid": len(grid.front),
            "adaptive_simulated": found.simulated,
            "adaptive_seconds": adaptive_s,
            "grid_simulated": grid.simulated,
            "grid_seconds": grid_s,
            "stages": found.found.stages,
            "out_of_budget": found.found.out_of_budget,
        }
        results.append(result)
        rows.append(
            [
                workload.name,
                str(result["requests"]),
                f"{result['adaptive_evaluations']} of {result['grid_evaluations']}",
                f"{100 * result['evaluations_share']:.1f} %",
                f"{100 * result['hypervolume_share']:.2f} %",
                f"{len(found.front)} / {len(grid.front)}",
                f"{adaptive_s:.0f} s ({found.simulated} new)",
                f"{grid_s:.0f} s ({grid.simulated} new)",
            ]
        )
        print(text_table(_HEAD, rows[-1:]), flush=True)
    print("\n" + text_table(_HEAD, rows))
    if args.json:
        args.json.write_text(json.dumps(results, indent=1) + "\n")


_HEAD = (
    "workload",
    "requests",
    "evaluations",
    "share",
    "hypervolume",
    "front",
    "adaptive took",
    "then the grid",
)

if __name__ == "__main__":
    main()
