"""Figures of a plan: each pair of objectives, and the gain from DRAM."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter

from canopy_lab.plan.choice import label_of
from canopy_lab.plan.objective import Evaluated, Metric, Objectives
from canopy_lab.plan.planner import CapacityPlan
from canopy_lab.plan.space import Configuration
from canopy_lab.plan.text import (
    EXTREMES_HEAD,
    HEAD,
    LOADS_HEAD,
    cells,
    choice_text,
    extremes,
    loads,
    overview,
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
from canopy_lab.report.html import HtmlTable, Page, Section, png_bytes
from sglang_canopy.errors import CanopyError

_NAMES = {
    "mean_ttft": "mean TTFT",
    "p50_ttft": "median TTFT",
    "p90_ttft": "P90 TTFT",
    "p99_ttft": "P99 TTFT",
    "mean_tpot": "mean time a token",
    "mean_e2e": "mean time a request",
    "throughput": "throughput",
    "token_hit_ratio": "token hit ratio",
    "cost": "cost of the trace",
    "cost_per_hour": "cost an hour",
}
_COLOURS = (BLUE, GREEN, PINK, SKY, "#E69F00", "#7a4fa3")


def charts(plan: CapacityPlan, currency: str) -> Iterator[tuple[str, str, Figure]]:
    yield "front", "The front, two objectives at a time", _pairs(plan, currency)
    yield "dram", "What DRAM wins", _dram(plan, currency)


def _pairs(plan: CapacityPlan, currency: str) -> Figure:
    metrics = Objectives.of(plan.request.objectives).metrics
    pairs = list(combinations(metrics, 2))[:3]
    figure, axes = new_figure(columns=len(pairs), height=3.9)
    for panel, (x, y) in zip(axes.flat, pairs):
        _scatter(panel, plan, x, y, currency)
    figure.legend(
        handles=_legend(plan), loc="outside lower center", ncols=4, frameon=False, fontsize=8
    )
    return figure


def _scatter(axes: Axes, plan: CapacityPlan, x: Metric, y: Metric, currency: str) -> None:
    rows = list(plan.found.rows.values())
    axes.scatter(*_xy(rows, x, y), s=9, color=FAINT, edgecolor=GREY, linewidth=0.4, zorder=2)
    colours = _classes(plan)
    for name, colour in colours.items():
        group = [row for row in plan.front if (row.configuration.disk or "no disk") == name]
        axes.scatter(*_xy(group, x, y), s=22, color=colour, zorder=3)
    axes.scatter(*_xy([plan.baseline], x, y), s=55, marker="s", color=INK, zorder=4)
    axes.scatter(*_xy([plan.choice.row], x, y), s=130, marker="*", color=ORANGE, zorder=5)
    name_axes(axes, _axis(x, currency), _axis(y, currency))
    axes.locator_params(nbins=4)
    axes.ticklabel_format(useOffset=False)
    title(axes, f"{_better(y)} and {_better(x, across=True)} is better")


def _dram(plan: CapacityPlan, currency: str) -> Figure:
    """Plot mean TTFT and hits against DRAM.

    One line is for the chosen disk, and one for each of the five other disks with the most DRAM
    sizes. If several rows have one size, the row with the least mean TTFT is drawn.
    """
    del currency
    figure, axes = new_figure(columns=2, height=3.6)
    lines: dict[str, dict[float, Evaluated]] = {}
    first = plan.space.first_slices()[0]
    for row in plan.found.rows.values():
        c = row.configuration
        if (c.instances, c.ttl) == (first.instances, first.ttl):
            line = lines.setdefault(_disk(c), {})
            best = line.setdefault(c.dram_gib, row)
            line[c.dram_gib] = min(best, row, key=lambda r: float(r["mean_ttft_s"]))
    chosen = _disk(plan.choice.row.configuration)
    shown = sorted(lines.items(), key=lambda kv: (kv[0] != chosen, -len(kv[1]), kv[0]))[:6]
    for (name, line), colour in zip(shown, _COLOURS):
        rows = [line[size] for size in sorted(line)]
        sizes = [max(row.configuration.dram_gib, plan.space.dram_gib[1] / 2) for row in rows]
        for panel, metric, factor in zip(axes.flat, ("mean_ttft_s", "token_hit_ratio"), (1, 100)):
            panel.plot(
                sizes, [factor * row[metric] for row in rows],
                marker="o", ms=3.5, lw=1.3, color=colour, label=name,
            )  # fmt: skip
    for panel, y in zip(axes.flat, ("mean TTFT, s", "token hit ratio, %")):
        panel.set_xscale("log", base=2)
        panel.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}"))
        name_axes(panel, "DRAM of an instance, GiB (leftmost: none)", y)
        panel.set_ylim(0, 1.06 * panel.dataLim.y1)
    title(axes.flat[0], "Where a larger DRAM stops paying")
    axes.flat[1].legend(frameon=False, fontsize=7.5)
    return figure


def _disk(c: Configuration) -> str:
    return f"{c.disk_gib:g} GiB {c.disk}" if c.disk else "no disk"


def _classes(plan: CapacityPlan) -> dict[str, str]:
    names = ["no disk", *plan.space.disks]
    present = {row.configuration.disk or "no disk" for row in plan.front}
    return {n: _COLOURS[i % len(_COLOURS)] for i, n in enumerate(names) if n in present}


def _legend(plan: CapacityPlan) -> list[Line2D]:
    def dot(colour: str, marker: str, size: float, label: str) -> Line2D:
        return Line2D([], [], ls="", marker=marker, ms=size, color=colour, label=label)

    return [
        *(dot(colour, "o", 5, f"front: {name}") for name, colour in _classes(plan).items()),
        dot(FAINT, "o", 4, "evaluated, dominated"),
        dot(INK, "s", 6, "fixed baseline"),
        dot(ORANGE, "*", 10, "chosen"),
    ]


def _value(row: Evaluated, of: Metric) -> float:
    value = float(row[of.key])
    if of.unit == "tokens/s":
        return value / 1000
    return 100 * value if of.unit == "share" else value


def _xy(rows: list[Evaluated], x: Metric, y: Metric) -> tuple[np.ndarray, np.ndarray]:
    return np.array([_value(r, x) for r in rows]), np.array([_value(r, y) for r in rows])


def _axis(of: Metric, currency: str) -> str:
    units = {
        "s": "s",
        "tokens/s": "thousand tokens/s",
        "money": currency,
        "money/h": f"{currency}/h",
        "share": "%",
    }
    return f"{_NAMES[of.name]}, {units[of.unit]}"


def _better(of: Metric, across: bool = False) -> str:
    if across:
        return "right" if of.maximise else "left"
    return "Up" if of.maximise else "Down"


def write_figures(folder: Path | str, plan: CapacityPlan, currency: str) -> None:
    """Write the page's figures as PNG into an existing folder. Raises ``CanopyError``."""
    for name, _, figure in charts(plan, currency):
        path = Path(folder) / f"plan_{name}.png"
        try:
            figure.savefig(path, format="png")
        except OSError as error:
            raise CanopyError(f"cannot write {str(path)!r}: {error}") from None


def page(plan: CapacityPlan, about: Mapping[str, Any], currency: str) -> Page:
    details = overview(plan)
    if about.get("example_prices"):
        sources = "; ".join(about["price_sources"])
        details.append(
            f"Prices: {about['prices']}, an example to replace by your own. Sources: {sources}."
        )
    details.append("; ".join(f"{k}: {v}" for k, v in about.items() if k != "price_sources") + ".")
    figures = [
        Section(what, figure=(png_bytes(figure),)) for _, what, figure in charts(plan, currency)
    ]
    return Page(
        f"A plan for {Path(about.get('trace', 'a trace')).name}", [*figures, *_tables(plan)],
        box=choice_text(plan, currency), details=details, width="74rem", command="plan",
        source="; the method is after Kareto, arXiv 2603.08739.",
    )  # fmt: skip


def _tables(plan: CapacityPlan) -> list[Section]:
    chosen = plan.choice.row.configuration
    at = [row.configuration for row in plan.front]
    front = HtmlTable(
        HEAD, [[label_of(row), *cells(row)] for row in plan.front],
        marked=at.index(chosen) if chosen in at else None,
    )  # fmt: skip
    best = HtmlTable(EXTREMES_HEAD, extremes(plan), text=(1,))
    sections = [
        Section("Pareto front: no other configuration is better in cost, TTFT and throughput together", table=front),
        Section("Best in each objective, against the fixed baseline", table=best),
    ]  # fmt: skip
    if plan.neighbours:
        lines = [[label_of(n.row), *cells(n.row), n.why] for n in plan.neighbours]
        table = HtmlTable((*HEAD, "why not"), lines, text=(len(HEAD),))
        sections.append(
            Section("Neighbouring configurations, and why they were not chosen", table=table)
        )
    if len(plan.sensitivity) > 1:
        table = HtmlTable(LOADS_HEAD, loads(plan))
        sections.append(Section("The choice at other loads", table=table))
    return sections
