"""A plan as one HTML page that needs nothing else."""

from __future__ import annotations

import base64
import html
import io
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from sglang_canopy import __version__
from sglang_canopy.errors import CanopyError
from sglang_canopy.plan.choice import configuration_of
from sglang_canopy.plan.objective import Row
from sglang_canopy.plan.planner import Plan
from sglang_canopy.private_file import replace_file
from sglang_canopy.report.plan_charts import charts
from sglang_canopy.report.plan_text import (
    EXTREMES_HEAD,
    HEAD,
    cells,
    choice_text,
    extremes,
    overview,
)

_STYLE = """
body{font:16px/1.5 system-ui,"DejaVu Sans",sans-serif;color:#222;max-width:66rem;margin:2rem auto;
padding:0 1rem}
h1{font-size:1.6rem;margin:0}h2{font-size:1.2rem;margin:2.2rem 0 .3rem;border-top:1px solid #d9d9d9;
padding-top:1rem}
p{margin:.4rem 0;max-width:52rem}img{max-width:100%;height:auto;margin:.6rem 0}
table{border-collapse:collapse;font-size:.85rem;margin:.6rem 0}
td,th{padding:.15rem .6rem;text-align:right;border-bottom:1px solid #eee;white-space:nowrap}
td:first-child,th:first-child,td.t{text-align:left}tr.chosen{background:#fff3e0;font-weight:600}
.box{background:#f5f5f2;padding:.6rem 1rem;border-radius:6px}.small{color:#6b6b6b;font-size:.85rem}
.wide{overflow-x:auto}
"""


def write_page(path: Path | str, plan: Plan, about: Mapping[str, Any], currency: str) -> None:
    """Write the page, for its owner alone, whole or not at all. Raises ``CanopyError``."""
    write_private(Path(path), page(plan, about, currency))


def write_figures(folder: Path | str, plan: Plan, currency: str) -> None:
    """Write the page's figures as PNG into an existing folder. Raises ``CanopyError``."""
    for name, _, figure in charts(plan, currency):
        path = Path(folder) / f"plan_{name}.png"
        try:
            figure.savefig(path, format="png")
        except OSError as error:
            raise CanopyError(f"cannot write {str(path)!r}: {error}") from None


def page(plan: Plan, about: Mapping[str, Any], currency: str) -> str:
    """The page, figures included as data."""
    name = html.escape(str(about.get("trace", "a trace")))
    parts = [
        "<!doctype html><html lang=en><meta charset=utf-8>",
        '<meta name=viewport content="width=device-width,initial-scale=1">',
        f"<title>A plan for {name}</title><style>{_STYLE}</style>",
        f"<h1>A plan for {name}</h1>",
        *(f"<p>{html.escape(line)}</p>" for line in overview(plan)),
        "<div class=box>",
        *(f"<p>{html.escape(line.strip())}</p>" for line in choice_text(plan, currency)),
        "</div>",
    ]
    if about.get("example_prices"):
        parts.append(
            f"<p class=small>Prices: <b>{html.escape(str(about['prices']))}</b>, an example to "
            "replace by your own. Sources: "
            f"{html.escape('; '.join(about.get('price_sources', ())))}.</p>"
        )
    for _, what, figure in charts(plan, currency):
        buffer = io.BytesIO()
        figure.savefig(buffer, format="png")
        data = base64.b64encode(buffer.getvalue()).decode()
        parts.append(
            f"<h2>{html.escape(what)}</h2>"
            f'<img alt="{html.escape(what)}" src="data:image/png;base64,{data}">'
        )
    parts.append("<h2>Non-dominated configurations</h2>" + _rows(plan.front, plan.choice.row))
    parts.append("<h2>Extremes beside the fixed baseline</h2>")
    parts.append(_table(EXTREMES_HEAD, extremes(plan), text=(1,)))
    if plan.neighbours:
        parts.append("<h2>Why not the ones beside it</h2>")
        lines = [[configuration_of(n.row).label(), *cells(n.row), n.why] for n in plan.neighbours]
        parts.append(_table((*HEAD, "why not"), lines, text=(8,)))
    if len(plan.sensitivity) > 1:
        parts.append("<h2>The choice at other loads</h2>")
        lines = [[f"{100 * (a - 1):+.0f} %", *cells(r)] for a, r in plan.sensitivity.items()]
        parts.append(_table(("load", *HEAD[1:]), lines))
    facts = "; ".join(f"{k}: {v}" for k, v in about.items() if k not in ("price_sources",))
    parts.append(
        f"<p class=small>{html.escape(facts)}. Made by canopy plan {__version__}; the method is "
        "that of Kareto, arXiv 2603.08739, as far as it is published.</p></html>"
    )
    return "\n".join(parts)


def write_private(path: Path, text: str) -> None:
    """Write ``text`` with mode 0600, whole or not at all. Raises ``CanopyError``."""
    try:
        replace_file(path, text)
    except OSError as error:
        raise CanopyError(f"cannot write {str(path)!r}: {error}") from None


def _rows(rows: Iterable[Row], chosen: Row) -> str:
    lines, marked = [], None
    for at, row in enumerate(rows):
        c = configuration_of(row)
        if c == configuration_of(chosen):
            marked = at
        lines.append([c.label(), *cells(row)])
    return _table(HEAD, lines, marked=marked)


def _table(
    head: Sequence[str],
    lines: Iterable[Sequence[str]],
    *,
    marked: int | None = None,
    text: Sequence[int] = (),
) -> str:
    parts = ["<div class=wide><table><tr>", *(f"<th>{html.escape(h)}</th>" for h in head), "</tr>"]
    for at, line in enumerate(lines):
        parts.append("<tr class=chosen>" if at == marked else "<tr>")
        for column, cell in enumerate(line):
            kind = " class=t" if column in text else ""
            parts.append(f"<td{kind}>{html.escape(cell)}</td>")
        parts.append("</tr>")
    return "".join([*parts, "</table></div>"])
