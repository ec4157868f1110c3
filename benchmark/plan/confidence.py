"""Share of plans whose limits hold on fresh traffic, against the stated confidence.

    python benchmark/plan/confidence.py --out benchmark/plan/results/confidence.json

Draws a log, plans for it, and simulates the choice on fresh logs of the same population: chats of a
geometric number of turns with lognormal prompts and pauses, which start at random. Writes a row per
plan; rows of other sizes stay.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path
from typing import Any

from canopy_lab.plan.choice import configuration_of, label_of, parse_constraint
from canopy_lab.plan.evaluate import Evaluator
from canopy_lab.plan.planner import PlanRequest, make_plan
from canopy_lab.plan.prices import load_prices
from canopy_lab.plan.system import Engine
from canopy_lab.plan.worker import PlanInputs
from canopy_lab.sim.compact import CompactTrace
from canopy_lab.sim.system.engine_profile import load_profile
from canopy_lab.trace.record import TraceRequest

BLOCK = 64
SPAN_S = 1800.0
LIMITS = {120: "p99_ttft<0.6s", 500: "p99_ttft<1s"}
"""Limit by conversations in a log: some of the tried sizes meet it, and some do not."""
FRESH_FROM = 1000
LONGEST = 800
"""Blocks of a prompt."""


def log(seed: int, conversations: int) -> CompactTrace:
    """Draw a log of half an hour."""
    draw, made, following = random.Random(seed), [], 1000
    begin = 0.0
    for number in range(conversations):
        begin += draw.expovariate(conversations / SPAN_S)
        path, at, turn = list(range(following, following + 8)), begin, 1
        following += 8
        while True:
            more = max(1, int(draw.lognormvariate(3.2, 0.9)))
            path = [*path, *range(following, following + more)][:LONGEST]
            following += more
            made.append((at, number, turn, tuple(path)))
            if draw.random() > 0.6:
                break
            at += draw.lognormvariate(4.0, 1.0)
            turn += 1
    made.sort(key=lambda request: request[0])
    return CompactTrace(
        TraceRequest(
            at - made[0][0], len(path) * BLOCK, 60, path, BLOCK,
            turn=turn, conversation=str(number), line=line,
        )
        for line, (at, number, turn, path) in enumerate(made)
    )  # fmt: skip


def inputs(trace: CompactTrace) -> PlanInputs:
    engine = Engine(profile=load_profile("llama-3.1-8b-h100"), device_tokens=60_000)
    return PlanInputs(trace, engine, load_prices("aws-us-east-1"))


def row(seed: int, conversations: int, limit: str, fresh: list[PlanInputs]) -> dict[str, Any]:
    """Plan for one log; judge its choice on the fresh ones."""
    constraint = parse_constraint(limit)
    request = PlanRequest(
        disks=(), choices={"page_size": (64,)}, constraints=(constraint,), sample_requests=0
    )
    plan = make_plan(request, inputs(log(seed, conversations)), jobs=1)
    chosen, held = configuration_of(plan.choice.row), []
    for work in fresh:
        with Evaluator(work, jobs=1) as evaluate:
            held.append(constraint.met(evaluate([chosen])[0]))
    return {
        "conversations": conversations,
        "limit": limit,
        "seed": seed,
        "chosen": label_of(plan.choice.row),
        "p99_ttft_s": plan.choice.row["p99_ttft_s"],
        "feasible": plan.choice.feasible,
        "said": None if plan.uncertainty is None else plan.uncertainty.met,
        "held": sum(held) / len(held),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--conversations", type=int, choices=list(LIMITS), action="append")
    parser.add_argument("--limit", help="in place of the one in LIMITS")
    parser.add_argument("--plans", type=int, default=8)
    parser.add_argument("--fresh", type=int, default=12)
    args = parser.parse_args()
    rows = json.loads(args.out.read_text()) if args.out.exists() else []
    for conversations in args.conversations or LIMITS:
        limit = args.limit or LIMITS[conversations]
        rows = [r for r in rows if (r["conversations"], r["limit"]) != (conversations, limit)]
        fresh = [inputs(log(FRESH_FROM + seed, conversations)) for seed in range(args.fresh)]
        for seed in range(args.plans):
            rows.append(row(seed, conversations, limit, fresh))
            print(rows[-1], flush=True)
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
