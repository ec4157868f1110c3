"""The adaptive search's share of the full grid's dominated volume, and its number of simulations.

Both use the same simulations and the same reference point: the worst of each objective over all
evaluations, and 5 % beyond. The grid has equal steps, finer than the sizes that the search
begins with, and the search refines to sizes that are not on it, so that a share above 100 % is
possible. The search runs first and without the grid's results.
"""

from __future__ import annotations

import argparse
import json
import time

import numpy as np
from workloads import add_arguments, chosen, request, work_of

from canopy_lab.plan.evaluate import Evaluator
from canopy_lab.plan.objective import Objectives, Scale
from canopy_lab.plan.planner import GRID_STEPS, make_plan
from canopy_lab.report.table import text_table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    add_arguments(parser)
    args = parser.parse_args()
    lines, results = [], []
    for workload in chosen(args):
        work = work_of(workload, args)
        started = time.perf_counter()
        found = make_plan(request(args), work, jobs=args.jobs, cache=args.cache)
        adaptive_s = time.perf_counter() - started
        started = time.perf_counter()
        objectives = Objectives.of(found.request.objectives)
        with Evaluator(work, jobs=args.jobs, cache=args.cache) as evaluate:
            grid = evaluate(found.space.finer(*GRID_STEPS).grid())
        grid_s = time.perf_counter() - started
        points, mine = (objectives.matrix(rows) for rows in (grid, found.found.rows.values()))
        scale = Scale.of(np.vstack([points, mine]))
        whole, part = scale.hypervolume(points), scale.hypervolume(mine)
        result = {
            "workload": workload.name,
            "requests": len(work.trace),
            "footprint_gib": found.footprint_gib,
            "adaptive_evaluations": len(found.found.rows),
            "grid_evaluations": len(grid),
            "evaluations_share": len(found.found.rows) / len(grid),
            "left_to_gain": found.found.left,
            "hypervolume_share": part / whole,
            "front_adaptive": len(found.front),
            "front_grid": len(objectives.front(grid)),
            "adaptive_simulated": found.simulated,
            "adaptive_seconds": adaptive_s,
            "grid_simulated": evaluate.simulated,
            "grid_seconds": grid_s,
            "stages": found.found.stages,
            "out_of_budget": found.found.out_of_budget,
        }
        results.append(result)
        lines.append(
            [
                workload.name,
                str(result["requests"]),
                f"{result['adaptive_evaluations']} of {result['grid_evaluations']}",
                f"{100 * result['evaluations_share']:.1f} %",
                f"{100 * found.found.left:.2f} %",
                f"{100 * result['hypervolume_share']:.2f} %",
                f"{len(found.front)} / {len(objectives.front(grid))}",
                f"{adaptive_s:.0f} s ({found.simulated} new)",
                f"{grid_s:.0f} s ({evaluate.simulated} new)",
            ]
        )
        print(text_table(_HEAD, lines[-1:]), flush=True)
    print("\n" + text_table(_HEAD, lines))
    if args.json:
        args.json.write_text(json.dumps(results, indent=1) + "\n")


_HEAD = (
    "workload",
    "requests",
    "evaluations",
    "share",
    "left to gain",
    "hypervolume",
    "front",
    "adaptive took",
    "then the grid",
)

if __name__ == "__main__":
    main()
