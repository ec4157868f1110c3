"""Print a plan: the front, the extremes and the baseline, the choice and its reasons."""

from __future__ import annotations

from collections.abc import Iterable

from canopy_lab.plan.choice import gains_over, label_of, value_text
from canopy_lab.plan.objective import METRICS, PlanRow
from canopy_lab.plan.planner import CapacityPlan
from canopy_lab.plan.sizes import format_gib
from canopy_lab.report.table import text_table

_SHOWN_METRICS = ("mean_ttft", "p99_ttft", "throughput", "token_hit_ratio", "cost_per_hour", "cost")
PLAN_HEAD = (
    "configuration", "mean TTFT", "P99 TTFT", "tokens/s", "hits", "device/host/disk", "GPU h saved/day", "$/h", "cost",
)  # fmt: skip
EXTREMES_HEAD = ("", *PLAN_HEAD, "throughput ±", "TTFT ±", "cost ±")
LOADS_HEAD = ("load", *PLAN_HEAD[1:], "meets")


def plan_text(plan: CapacityPlan, currency: str) -> str:
    parts = [
        *overview(plan),
        "",
        f"Pareto front ({len(plan.front)} of {len(plan.result.rows)} evaluated):",
        configurations_table(plan.front, mark=plan.choice.row),
        "",
        f"Best in each objective, against the fixed baseline ({label_of(plan.baseline)}):",
        text_table(EXTREMES_HEAD, extreme_rows(plan)),
        "",
        *choice_text(plan, currency),
    ]
    if len(plan.sensitivity) > 1:
        parts += ["", "The same configuration at other loads:"]
        parts.append(text_table(LOADS_HEAD, load_rows(plan)))
    return "\n".join(parts)


def overview(plan: CapacityPlan) -> list[str]:
    """Summarise the run in two or three lines."""
    stages = ", ".join(f"{count} {name}" for name, count in plan.result.stages.items())
    lines = [
        f"Distinct KV of the trace: {format_gib(plan.footprint_gib)}, of which more than one request "
        f"uses {format_gib(plan.reusable_gib)}. "
        f"{len(plan.result.rows)} configurations evaluated ({stages}). "
        f"A grid in equal steps has {plan.grid_size}.",
        f"{plan.simulated} simulations, {plan.seconds:.1f} s. Hypervolume of the front: {plan.hypervolume:.4f} of 1.",
    ]
    if plan.result.is_out_of_budget and not plan.predicted:
        lines.append("The search stopped at its limit of evaluations (--search evaluations=N).")
    if plan.predicted:
        lines.append(
            f"{plan.predicted} of them were simulated on the busiest "
            f"{plan.request.sample_requests:,} requests only (~): none could be the choice within "
            "the margins of those simulated on all (--search sample_requests=0 simulates all on all)."
        )
    else:
        lines.append(
            f"Sizes between those evaluated could add {100 * plan.result.remaining_gain:.2g} % to that volume "
            "at most, if more room is never slower."
        )
    return lines


def configurations_table(rows: Iterable[PlanRow], mark: PlanRow | None = None) -> str:
    """Return one line per configuration; the marked row has a star."""
    lines = []
    for row in rows:
        c = row.configuration
        star = "* " if mark is not None and mark.configuration == c else ""
        lines.append([star + label_of(row), *row_cells(row)])
    return text_table(PLAN_HEAD, lines)


def row_cells(row: PlanRow) -> list[str]:
    tiers = row["token_hit_ratio_by_tier"]
    return [
        value_text(METRICS["mean_ttft"], row["mean_ttft_s"]),
        value_text(METRICS["p99_ttft"], row["p99_ttft_s"]),
        f"{row['throughput_tokens_per_s']:.0f}",
        f"{100 * row['token_hit_ratio']:.1f} %",
        "/".join(f"{100 * tiers.get(tier, 0.0):.1f}" for tier in ("device", "host", "disk")),
        gpu_hours_per_day(row),
        f"{row['cost_per_hour']:.3f}",
        f"{row['cost']:.3f}",
    ]


def gpu_hours_per_day(row: PlanRow) -> str:
    """Format the prefill GPU hours that hits save per day at the trace's rate, all instances."""
    saved_s, span_s = map(row.metrics.get, ("prefill_s_saved_by_tier", "makespan_s"))
    return f"{24 * sum(saved_s.values()) / span_s:.3g}" if saved_s and span_s else "-"


def extreme_rows(plan: CapacityPlan) -> list[list[str]]:
    """Return the baseline, and the extreme points with their gains, for ``EXTREMES_HEAD``."""
    rows = [["fixed baseline", label_of(plan.baseline), *row_cells(plan.baseline)]]
    rows[0] += ["", "", ""]
    for name, row in plan.extremes.items():
        gains = gains_over(row, plan.baseline)
        change = (gains["throughput_gain"], -gains["mean_ttft_saved"], -gains["cost_saved"])
        rows.append(
            [name, label_of(row), *row_cells(row), *(f"{100 * share:+.1f} %" for share in change)]
        )
    return rows


def choice_text(plan: CapacityPlan, currency: str) -> list[str]:
    """Describe the choice, or the binding constraints if no row is feasible."""
    request, row = plan.request, plan.choice.row
    criterion = f"{'most' if request.minimise.is_maximised else 'least'} {request.minimise.name}"
    limits = " and ".join(c.text for c in request.constraints)
    if plan.choice.is_feasible:
        condition = f", given {limits}" if limits else ""
        return [
            f"Chosen ({criterion}{condition}): {label_of(row)}",
            f"  {main_metrics(row)}, {row['cost_per_hour']:.3f} {currency}/h",
        ]
    lines = [f"No configuration meets {limits}. What binds:"]
    for constraint in plan.choice.binding:
        nearest_row = min(plan.result.rows.values(), key=lambda r: constraint.shortfall(r))
        value = value_text(constraint.metric, constraint.value(nearest_row))
        lines.append(
            f"  {constraint.text}: the best found is {value}, with {label_of(nearest_row)}"
            if not constraint.is_met(nearest_row)
            else f"  {constraint.text}: can be met alone, not together with the others"
        )
    lines += [
        f"The nearest feasible point: {label_of(row)}",
        f"  {main_metrics(row)}, {row['cost_per_hour']:.3f} {currency}/h",
        f"  it is feasible with: {relaxed_constraints(plan)}",
        f"Try next: {option_to_change(plan)}.",
    ]
    return lines


def option_to_change(plan: CapacityPlan) -> str:
    """Return the option to change if no configuration meets the limits."""
    units = {c.metric.unit for c in plan.choice.binding}
    money = {"money", "money/h"} & units
    instances = plan.request.instances
    if money and units - money:
        return "other limits: less cost and better service exclude each other here"
    if money:
        fewer = (
            f"fewer instances (--instances {min(instances) // 2}), or "
            if min(instances) > 1
            else ""
        )
        return f"{fewer}a cheaper price list (--prices)"
    if units == {"share"}:
        return "more memory (--search dram_gib=G,disk_gib=G, --device-tokens); some prompts never repeat"
    return f"more instances (--instances {2 * max(instances)})"


def relaxed_constraints(plan: CapacityPlan) -> str:
    """Return the constraints, relaxed so that the nearest point meets them."""
    row, parts = plan.choice.row, []
    for c in plan.request.constraints:
        sign = "<" if c.is_upper_bound else ">"
        if c.is_met(row):
            parts.append(c.text)
        else:
            value = c.value(row) * (1.005 if c.is_upper_bound else 0.995)
            parts.append(f"{c.metric.name}{sign}{value:.4g}")
    return " and ".join(parts)


def main_metrics(row: PlanRow) -> str:
    return ", ".join(
        f"{name} {value_text(METRICS[name], row[METRICS[name].key])}" for name in _SHOWN_METRICS[:4]
    )


def load_rows(plan: CapacityPlan) -> list[list[str]]:
    """Return the choice at each load, and whether it meets the constraints, for ``LOADS_HEAD``."""
    lines = []
    for load, row in plan.sensitivity.items():
        is_met = all(c.is_met(row) for c in plan.request.constraints)
        change = f"{100 * (load - 1):+.0f} %" if load != 1 else "as in the trace"
        lines.append([change, *row_cells(row), "yes" if is_met else "no"])
    return lines
