"""Golden rows of a plan by ``canopy plan``: every configuration that it tried, and its choice."""

from __future__ import annotations

import contextlib
import io
import json
import tempfile
from pathlib import Path
from typing import Any

from paths import data_folder, digest

from canopy_lab.cli.main import main

TRACE_REQUESTS = 500
PLAN_OPTIONS = (
    *("--format", "mooncake", "--profile", "qwen2.5-7b-h100", "--requests", str(TRACE_REQUESTS)),
    *("--device-tokens", "300000", "--load", "0.25", "--policy", "canopy-lru"),
    *("--slo", "p99_ttft<15s", "--search", "evaluations=60"),
    *("--jobs", "1"),
)
DIGESTED_PARTS = ("front", "extremes", "sensitivity")
"""Parts of the report that are stored as a digest."""

TIER_POLICIES = ("device_policy", "host_policy", "disk_policy")

PlanTask = str


def tasks() -> list[PlanTask]:
    """Return the only task."""
    return ["plan"]


def rows(task: PlanTask) -> dict[str, Any]:
    """Return a row for each configuration, the choice, the baseline, and figures of the whole report."""
    report = run_plan()
    rows_by_name = {"the plan, chosen": without_seconds(report["chosen"])}
    rows_by_name["the plan, baseline"] = without_seconds(report["baseline"])
    rows_by_name["the plan, all of it"] = {
        "evaluations": report["evaluations"],
        "stages": report["stages"],
        "grid_size": report["grid_size"],
        "feasible": report["feasible"],
        "binding": report["binding"],
        "hypervolume": report["hypervolume"],
        "footprint_gib": report["footprint_gib"],
        **{part: digest(without_seconds(report[part])) for part in DIGESTED_PARTS},
    }
    for number, evaluation in enumerate(report["evaluated"]):
        rows_by_name[f"the plan, tried {number:03d}"] = without_seconds(evaluation)
    return rows_by_name


def run_plan() -> dict[str, Any]:
    """Return the report that ``canopy plan --json-out`` writes."""
    trace = data_folder() / "mooncake" / "conversation_first60.jsonl"
    with tempfile.TemporaryDirectory() as folder:
        report_file = Path(folder) / "plan.json"
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            status = main(["plan", str(trace), *PLAN_OPTIONS, "--json-out", str(report_file)])
        if status != 0:
            raise SystemExit(f"canopy plan ended with {status}")
        return json.loads(report_file.read_text())


def without_seconds(value: Any) -> Any:
    """Return the value without `seconds`, and with each `policy` written once per tier."""
    if isinstance(value, dict):
        cleaned: dict[str, Any] = {}
        for key, child in value.items():
            # rows.json has a policy for each tier, all of them the same.
            keys = TIER_POLICIES if key == "policy" else () if key == "seconds" else (key,)
            cleaned |= dict.fromkeys(keys, without_seconds(child))
        return cleaned
    return [without_seconds(v) for v in value] if isinstance(value, list) else value
