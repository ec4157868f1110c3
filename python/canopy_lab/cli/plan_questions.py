"""What an operator asks beside a plan: which GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from canopy_lab.cli.plan_command import PlanCommand, for_profile
from canopy_lab.plan.choice import label_of
from canopy_lab.report.plan_text import HEAD, cells
from canopy_lab.report.table import text_table
from canopy_lab.sim.compact import CompactTrace

Read = Callable[[PlanCommand], tuple[CompactTrace, str]]
"""Reads the trace: its requests, and whose ids their blocks are."""
Plan = Callable[[PlanCommand, CompactTrace, str], tuple[Any, Any, dict[str, Any]]]
"""Plans for that: the plan, its inputs, and where it comes from."""


def compare(
    asked: PlanCommand,
    read: Read,
    plan: Plan,
    write: Callable[..., None],
) -> int:
    """``--compare``: a plan for each profile, their choices side by side; files are the best's."""
    made, trace = [], read(asked)
    for name, usd in asked.searching.compare:
        command = for_profile(asked, name, usd)
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
