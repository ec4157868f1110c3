"""Choose a point of the front: constraints and extremes."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from canopy_lab.plan.objective import PlanMetric, PlanRow, find_metric
from canopy_lab.plan.space import GROUP
from sglang_canopy.errors import CanopyError

_CONSTRAINT = re.compile(r"\s*([A-Za-z][\w-]*)\s*(<=|>=|<|>)\s*([-+0-9.eE]+)\s*([^\s\d]\S*)?\s*")
_UNITS: Mapping[str, Mapping[str, float]] = {
    "s": {"": 1.0, "s": 1.0, "ms": 1e-3, "us": 1e-6, "min": 60.0},
    "tokens/s": {"": 1.0, "tokens/s": 1.0, "tok/s": 1.0, "k": 1e3, "ktokens/s": 1e3},
    "money": {"": 1.0, "USD": 1.0, "usd": 1.0, "$": 1.0},
    "money/h": {"": 1.0, "/h": 1.0, "USD/h": 1.0, "usd/h": 1.0, "$/h": 1.0},
    "share": {"": 1.0, "%": 0.01},
}
_EXAMPLE = "p99_ttft<2s, mean_ttft<500ms, throughput>10000, cost_per_hour<12 or token_hit_ratio>60%"
_NEAR_TIE = 1e-3
"""Smaller relative differences count as equal."""


@dataclass(frozen=True, slots=True)
class Constraint:
    """``metric`` at most (or at least) ``limit``, in the metric's own unit."""

    metric: PlanMetric
    is_upper_bound: bool
    limit: float
    text: str

    def value(self, row: PlanRow | Mapping[str, float]) -> float:
        return float(row[self.metric.key])

    def is_met(self, row: PlanRow | Mapping[str, float]) -> bool:
        value = self.value(row)
        return value <= self.limit if self.is_upper_bound else value >= self.limit

    def shortfall(self, row: PlanRow | Mapping[str, float]) -> float:
        """Return the miss as a share of the limit; 0 if ``row`` meets it."""
        if self.is_met(row):
            return 0.0
        return abs(self.value(row) - self.limit) / max(abs(self.limit), 1e-12)


@dataclass(frozen=True, slots=True)
class ChosenConfiguration:
    """The chosen row, and the binding constraints if no row is feasible."""

    row: PlanRow
    is_feasible: bool
    binding: tuple[Constraint, ...] = ()
    """Constraints that no row meets, alone or together with the others."""


def parse_constraint(text: str) -> Constraint:
    """Parse ``p99_ttft<2s``. Raises ``CanopyError`` with the nearest metric or unit."""
    match = _CONSTRAINT.fullmatch(text)
    if match is None:
        raise CanopyError(
            f"{text!r} is not of the form METRIC<VALUE; for example {_EXAMPLE} "
            "(quote it: the shell takes < for a file)"
        )
    metric_name, sign, number, unit = match.groups()
    try:
        plan_metric = find_metric(metric_name)
    except CanopyError as error:
        raise CanopyError(f"{text!r}: {error}") from None
    units = _UNITS[plan_metric.unit]
    if (unit or "") not in units:
        unit_names = ", ".join(repr(u) for u in units if u)
        raise CanopyError(f"{text!r}: unit {unit!r} is not one of {unit_names}")
    try:
        limit = float(number) * units[unit or ""]
    except ValueError:
        limit = math.nan
    if not math.isfinite(limit):
        raise CanopyError(f"{text!r}: {number!r} is not a number")
    is_upper_bound = sign.startswith("<")
    if is_upper_bound == plan_metric.is_maximised:
        sign_text = ">" if plan_metric.is_maximised else "<"
        raise CanopyError(
            f"{text!r}: more {plan_metric.name} is {'better' if plan_metric.is_maximised else 'worse'}; "
            f"write {plan_metric.name}{sign_text}{number}{unit or ''}"
        )
    return Constraint(plan_metric, is_upper_bound, limit, text.strip())


def parse_constraints(texts: Sequence[str]) -> tuple[Constraint, ...]:
    """Parse several ``--slo`` options, each with one or more constraints separated by commas."""
    parts = [part for text in texts for part in text.split(",") if part.strip()]
    return tuple(parse_constraint(part) for part in parts)


def choose(
    rows: Sequence[PlanRow], constraints: Sequence[Constraint], minimise: PlanMetric
) -> ChosenConfiguration:
    """Return the best row by ``minimise`` (the most of a maximised metric) that meets every
    constraint. Among rows within a thousandth of the best, take the cheapest, then the quickest.

    If no row is feasible, return the row with the smallest total miss, and the binding constraints.
    """
    assert rows, "nothing was evaluated"
    feasible = [row for row in rows if all(c.is_met(row) for c in constraints)]
    if feasible:
        return ChosenConfiguration(_best_row(feasible, minimise), True)
    never_met = [c for c in constraints if not any(c.is_met(row) for row in rows)]
    nearest = min(
        rows, key=lambda row: (sum(c.shortfall(row) for c in constraints), _rank(row, minimise))
    )
    binding = never_met or [c for c in constraints if not c.is_met(nearest)]
    return ChosenConfiguration(nearest, False, tuple(binding))


def extremes(rows: Sequence[PlanRow], baseline: PlanRow) -> dict[str, PlanRow]:
    """Return the paper's three extreme points, and the cheapest row as good as the baseline.

    Among nearly equal rows the cheapest is taken. The fourth point has at most the baseline's mean
    TTFT and at least its throughput; it is missing if no row has.
    """
    extreme_rows = {
        name: _best_row(rows, find_metric(key))
        for name, key in (
            ("most throughput", "throughput"),
            ("least mean TTFT", "mean_ttft"),
            ("least cost", "cost"),
        )
    }
    matching = [
        row
        for row in rows
        if row["mean_ttft_s"] <= baseline["mean_ttft_s"] * (1 + _NEAR_TIE)
        and row["throughput_tokens_per_s"] >= baseline["throughput_tokens_per_s"] * (1 - _NEAR_TIE)
    ]
    if matching:
        extreme_rows["cheapest as good as fixed"] = _best_row(matching, find_metric("cost"))
    return extreme_rows


def gains_over(row: PlanRow, baseline: PlanRow) -> dict[str, float]:
    """Return the shares of the baseline's throughput gained, mean TTFT saved and cost saved."""
    return {
        "throughput_gain": row["throughput_tokens_per_s"] / baseline["throughput_tokens_per_s"] - 1,
        "mean_ttft_saved": 1 - row["mean_ttft_s"] / max(baseline["mean_ttft_s"], 1e-12),
        "cost_saved": 1 - row["cost"] / max(baseline["cost"], 1e-12),
    }


def value_text(metric: PlanMetric, value: float) -> str:
    """Format a value with its unit: ``1.52 s``, ``85 ms``, ``12.3k tokens/s``, ``61.0 %``."""
    if metric.unit == "s":
        if value >= 100:
            return f"{value:.0f} s"
        return f"{value:.3g} s" if value >= 1 else f"{1000 * value:.3g} ms"
    if metric.unit == "share":
        return f"{100 * value:.1f} %"
    if metric.unit == "tokens/s":
        return f"{value / 1000:.4g}k tokens/s" if value >= 1e4 else f"{value:.4g} tokens/s"
    return f"{value:.4g}" + ("/h" if metric.unit == "money/h" else "")


def label_of(row: PlanRow) -> str:
    """Return a short label of a row's configuration, with a summary of its group TTLs."""
    configuration, table = row.configuration, row.metrics.get("ttl_table")
    if row.predicted:
        return f"~ {configuration.label()}"
    if configuration.ttl != GROUP or table is None:
        return configuration.label()
    counts = [f"{table[name]} {name}" for name in ("groups", "categories") if table[name]]
    if counts:
        ttl_text = f"TTLs of {' and '.join(counts)}"
    else:
        seconds = table["residual_ttl_s"]
        single_ttl_text = "no expiry" if seconds is None else f"one TTL of {seconds:.4g} s"
        ttl_text = f"{single_ttl_text}, which no groups beat"
    if table["requests"] < row["requests"]:
        ttl_text += f", learnt from the last {table['requests']} requests"
    return configuration.label().replace("group TTL", ttl_text, 1)


def _best_row(rows: Sequence[PlanRow], metric: PlanMetric) -> PlanRow:
    """Return the best row by one metric. Near ties: the cheapest, then the quickest row."""
    sign = -1.0 if metric.is_maximised else 1.0
    best = min(sign * row[metric.key] for row in rows)
    near = [row for row in rows if sign * row[metric.key] <= best + abs(best) * _NEAR_TIE]
    return min(near, key=lambda row: (row["cost"], row["mean_ttft_s"], row.configuration.label()))


def _rank(row: PlanRow, minimise: PlanMetric) -> tuple[float, float, float, str]:
    sign = -1.0 if minimise.is_maximised else 1.0
    return sign * row[minimise.key], row["mean_ttft_s"], row["cost"], row.configuration.label()
