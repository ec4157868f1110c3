"""Write a plan as one self-contained HTML page."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from canopy_lab.plan.charts import charts
from canopy_lab.plan.choice import configuration_of, label_of
from canopy_lab.plan.objective import Row
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
from canopy_lab.report.html import HtmlTable, as_data, png_bytes, render
from sglang_canopy import __version__
from sglang_canopy.errors import CanopyError
from sglang_canopy.private_file import replace_file


def write_page(
    path: Path | str, plan: CapacityPlan, about: Mapping[str, Any], currency: str
) -> None:
    """Write the page atomically, readable by its owner only. Raises ``CanopyError``."""
    try:
        replace_file(path, page(plan, about, currency))
    except OSError as error:
        raise CanopyError(f"cannot write {str(path)!r}: {error}") from None


def write_figures(folder: Path | str, plan: CapacityPlan, currency: str) -> None:
    """Write the page's figures as PNG into an existing folder. Raises ``CanopyError``."""
    for name, _, figure in charts(plan, currency):
        path = Path(folder) / f"plan_{name}.png"
        try:
            figure.savefig(path, format="png")
        except OSError as error:
            raise CanopyError(f"cannot write {str(path)!r}: {error}") from None


def page(plan: CapacityPlan, about: Mapping[str, Any], currency: str) -> str:
    """Render the page, with its figures embedded."""
    return render(
        "plan",
        title=f"A plan for {Path(about.get('trace', 'a trace')).name}",
        overview=overview(plan),
        choice=choice_text(plan, currency),
        about={"example_prices": False, **about},
        figures=[(what, as_data(png_bytes(figure))) for _, what, figure in charts(plan, currency)],
        tables=_tables(plan),
        facts="; ".join(f"{k}: {v}" for k, v in about.items() if k != "price_sources"),
        version=__version__,
    )


def _tables(plan: CapacityPlan) -> list[tuple[str, HtmlTable]]:
    """Return the page's tables, each with its heading."""
    found = [
        (
            "Pareto front: no other configuration is better in cost, TTFT and throughput together",
            _front(plan.front, plan.choice.row),
        ),
        (
            "Best in each objective, against the fixed baseline",
            HtmlTable(EXTREMES_HEAD, extremes(plan), text=(1,)),
        ),
    ]
    if plan.neighbours:
        lines = [[label_of(n.row), *cells(n.row), n.why] for n in plan.neighbours]
        table = HtmlTable((*HEAD, "why not"), lines, text=(len(HEAD),))
        found.append(("Neighbouring configurations, and why they were not chosen", table))
    if len(plan.sensitivity) > 1:
        found.append(("The choice at other loads", HtmlTable(LOADS_HEAD, loads(plan))))
    return found


def _front(rows: Iterable[Row], chosen: Row) -> HtmlTable:
    lines, marked = [], None
    for at, row in enumerate(rows):
        configuration = configuration_of(row)
        if configuration == configuration_of(chosen):
            marked = at
        lines.append([label_of(row), *cells(row)])
    return HtmlTable(HEAD, lines, marked=marked)
