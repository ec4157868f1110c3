"""A plan as an HTML page: its tables, and the front by pairs of objectives."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from canopy_lab.plan.choice import label_of
from canopy_lab.plan.objective import OBJECTIVES, PlanMetric, PlanRow
from canopy_lab.plan.planner import CapacityPlan
from canopy_lab.plan.text import (
    EXTREMES_HEAD,
    LOADS_HEAD,
    PLAN_HEAD,
    choice_text,
    extreme_rows,
    load_rows,
    overview,
    row_cells,
)
from canopy_lab.report.axes import (
    BLUE,
    FAINT,
    GREEN,
    GREY,
    INK,
    ORANGE,
    PINK,
    SKY,
    name_axes,
    new_figure,
    title,
)
from canopy_lab.report.html import HtmlPage, HtmlTable, Section, png_bytes

_AXES = {
    "mean_ttft": "mean TTFT, s",
    "throughput": "throughput, thousand tokens/s",
    "cost": "cost of the trace, {currency}",
}
_COLOURS = (BLUE, GREEN, PINK, SKY, "#E69F00", "#7a4fa3")


def _draw_pairs(plan: CapacityPlan, currency: str) -> Figure:
    pairs = list(combinations(OBJECTIVES.metrics, 2))
    figure, axes = new_figure(columns=len(pairs), height=3.9)
    for panel, (x, y) in zip(axes.flat, pairs):
        _scatter(panel, plan, x, y, currency)
    figure.legend(
        handles=_legend(plan), loc="outside lower center", ncols=4, frameon=False, fontsize=8
    )
    return figure


def _scatter(axes: Axes, plan: CapacityPlan, x: PlanMetric, y: PlanMetric, currency: str) -> None:
    rows = list(plan.result.rows.values())
    axes.scatter(*_xy(rows, x, y), s=9, color=FAINT, edgecolor=GREY, linewidth=0.4, zorder=2)
    colours = _colours(plan)
    for name, colour in colours.items():
        disk_rows = [row for row in plan.front if (row.configuration.disk or "no disk") == name]
        axes.scatter(*_xy(disk_rows, x, y), s=22, color=colour, zorder=3)
    axes.scatter(*_xy([plan.baseline], x, y), s=55, marker="s", color=INK, zorder=4)
    axes.scatter(*_xy([plan.choice.row], x, y), s=130, marker="*", color=ORANGE, zorder=5)
    name_axes(axes, *(_AXES[plan_metric.name].format(currency=currency) for plan_metric in (x, y)))
    axes.locator_params(nbins=4)
    axes.ticklabel_format(useOffset=False)
    title(axes, f"{_better_direction(y)} and {_better_direction(x, is_x=True)} is better")


def _colours(plan: CapacityPlan) -> dict[str, str]:
    names = ["no disk", *plan.space.disks]
    present = {row.configuration.disk or "no disk" for row in plan.front}
    return {n: _COLOURS[i % len(_COLOURS)] for i, n in enumerate(names) if n in present}


def _legend(plan: CapacityPlan) -> list[Line2D]:
    def make_handle(colour: str, marker: str, size: float, label: str) -> Line2D:
        return Line2D([], [], ls="", marker=marker, ms=size, color=colour, label=label)

    return [
        *(make_handle(colour, "o", 5, f"front: {name}") for name, colour in _colours(plan).items()),
        make_handle(FAINT, "o", 4, "evaluated, dominated"),
        make_handle(INK, "s", 6, "fixed baseline"),
        make_handle(ORANGE, "*", 10, "chosen"),
    ]


def _value(row: PlanRow, plan_metric: PlanMetric) -> float:
    value = float(row[plan_metric.key])
    return value / 1000 if plan_metric.unit == "tokens/s" else value


def _xy(rows: list[PlanRow], x: PlanMetric, y: PlanMetric) -> tuple[np.ndarray, np.ndarray]:
    return np.array([_value(r, x) for r in rows]), np.array([_value(r, y) for r in rows])


def _better_direction(plan_metric: PlanMetric, is_x: bool = False) -> str:
    if is_x:
        return "right" if plan_metric.is_maximised else "left"
    return "Up" if plan_metric.is_maximised else "Down"


def make_page(plan: CapacityPlan, origin: Mapping[str, Any], currency: str) -> HtmlPage:
    details = overview(plan)
    if origin.get("example_prices"):
        sources = "; ".join(origin["price_sources"])
        details.append(
            f"Prices: {origin['prices']}, an example to replace by your own. Sources: {sources}."
        )
    details.append("; ".join(f"{k}: {v}" for k, v in origin.items() if k != "price_sources") + ".")
    pairs = png_bytes(_draw_pairs(plan, currency))
    front = Section("The front, two objectives at a time", figure=pairs)
    return HtmlPage(
        f"A plan for {Path(origin.get('trace', 'a trace')).name}", [front, *_tables(plan)],
        box=choice_text(plan, currency), details=details, width="74rem", command="plan",
        source="; the method is after Kareto, arXiv 2603.08739.",
    )  # fmt: skip


def _tables(plan: CapacityPlan) -> list[Section]:
    chosen = plan.choice.row.configuration
    configurations = [row.configuration for row in plan.front]
    front = HtmlTable(
        PLAN_HEAD, [[label_of(row), *row_cells(row)] for row in plan.front],
        marked=configurations.index(chosen) if chosen in configurations else None,
    )  # fmt: skip
    extremes_table = HtmlTable(EXTREMES_HEAD, extreme_rows(plan), text_columns=(1,))
    sections = [
        Section("Pareto front: no other configuration is better in cost, TTFT and throughput together", table=front),
        Section("Best in each objective, against the fixed baseline", table=extremes_table),
    ]  # fmt: skip
    if len(plan.sensitivity) > 1:
        table = HtmlTable(LOADS_HEAD, load_rows(plan))
        sections.append(Section("The choice at other loads", table=table))
    return sections
