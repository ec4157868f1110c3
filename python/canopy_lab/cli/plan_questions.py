"""What an operator asks beside a plan: which GPU, and what at which hour."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from typing import Any

from canopy_lab.cli.plan_options import PlanCommand, check, compared
from canopy_lab.plan.choice import label_of
from canopy_lab.plan.watch import between
from canopy_lab.report.plan_text import HEAD, cells
from canopy_lab.report.table import text_table
from canopy_lab.sim.compact import CompactTrace
from sglang_canopy.errors import CanopyError

Read = Callable[[PlanCommand], tuple[CompactTrace, str]]
"""Reads the trace: its requests, and whose ids their blocks are."""
Plan = Callable[[PlanCommand, CompactTrace, str], tuple[Any, Any, dict[str, Any]]]
"""Plans for that: the plan, its inputs, and where it comes from."""

MOST_SLOTS = 168


def compare(args: argparse.Namespace, read: Read, plan: Plan, write: Callable[..., None]) -> int:
    """``--compare``: a plan for each profile, their choices side by side; files are the best's."""
    if args.watch or args.schedule is not None:
        raise CanopyError("give one of --compare, --schedule and --watch")
    made, trace = [], None
    for name, price in compared(args):
        given = argparse.Namespace(**{**vars(args), "profile": name, "gpu_per_hour": price})
        command = check(given)
        trace = read(command) if trace is None else trace
        made.append((command, *plan(command, *trace)))
    rows = []
    for command, found, _, _ in made:
        right = "yes" if found.choice.feasible else "no"
        row, profile = found.choice.row, command.profile
        rows.append([profile.name, profile.source, label_of(row), *cells(row), right])
    print(text_table(("profile", "its times", *HEAD, "meets"), rows))
    able = [one for one in made if one[1].choice.feasible]
    if not able:
        print("None meets the limits.")
        return 0
    wanted = able[0][1].request.minimise
    sign = -1 if wanted.maximise else 1
    command, found, work, about = min(able, key=lambda m: sign * m[1].choice.row[wanted.key])
    print(f"Best by {wanted.name}: {command.profile.name}, {label_of(found.choice.row)}")
    write(command, found, work, about)
    return 0


def schedule(command: PlanCommand, read: Read, plan: Plan) -> int:
    """``--schedule H``: a plan for every H hours of the trace, and what they cost together beside
    the dearest of them all the time."""
    hours = command.args.schedule
    if not 0 < hours <= 168 or command.args.watch:
        raise CanopyError(
            f"--schedule must be above 0 and at most 168 hours, without --watch; got {hours}"
        )
    trace, ids = read(command)
    slots = max(1, math.ceil((trace[-1].time_s - trace[0].time_s) / 3600 / hours))
    if slots > MOST_SLOTS:
        raise CanopyError(f"the trace has more than {MOST_SLOTS} slots; give a longer --schedule")
    rows, spent, dearest = [], 0.0, 0.0
    for slot in range(slots):
        begin = slot * hours
        part = between(trace, begin, begin + hours)
        if not len(part):
            rows.append([f"{begin:g} to {begin + hours:g} h", "no requests", *[""] * len(HEAD)])
            continue
        found, work, _ = plan(command, part, ids)
        row = found.choice.row
        spent += row["cost_per_hour"] * hours
        dearest = max(dearest, row["cost_per_hour"])
        right = "yes" if found.choice.feasible else "no"
        when = f"{begin:g} to {begin + hours:g} h, {len(work.trace)} requests"
        rows.append([when, label_of(row), *cells(row), right])
    print(text_table(("when", *HEAD, "meets"), rows))
    money = f"{spent:.2f} for {slots * hours:g} h as planned, {dearest * slots * hours:.2f} with the dearest of them all the time"
    print(f"{money}. Each slot begins with empty caches; a change of sizes needs a new start.")
    return 0
