"""A plan as one self-contained HTML page."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from canopy_lab.plan.charts import charts
from canopy_lab.plan.choice import label_of
from canopy_lab.plan.planner import CapacityPlan
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
from canopy_lab.report.html import HtmlTable, Page, Section, png_bytes
from sglang_canopy.errors import CanopyError


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
    found = [
        Section("Pareto front: no other configuration is better in cost, TTFT and throughput together", table=front),
        Section("Best in each objective, against the fixed baseline", table=best),
    ]  # fmt: skip
    if plan.neighbours:
        lines = [[label_of(n.row), *cells(n.row), n.why] for n in plan.neighbours]
        table = HtmlTable((*HEAD, "why not"), lines, text=(len(HEAD),))
        found.append(
            Section("Neighbouring configurations, and why they were not chosen", table=table)
        )
    if len(plan.sensitivity) > 1:
        table = HtmlTable(LOADS_HEAD, loads(plan))
        found.append(Section("The choice at other loads", table=table))
    return found
