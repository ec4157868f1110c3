"""Write a characterisation as one self-contained HTML page, its figures and its JSON."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from canopy_lab.characterize.charts import charts
from canopy_lab.characterize.report import TraceReport
from canopy_lab.characterize.text import findings
from canopy_lab.report.html import HtmlTable, as_data, png_bytes, render
from canopy_lab.report.units import count, percent, seconds, size
from sglang_canopy import __version__
from sglang_canopy.errors import CanopyError

_QUESTIONS = (
    ("hits", "How much could be reused?", ("hits",)),
    ("skew", "Who has the reuse?", ("skew",)),
    ("turns", "How long are conversations?", ("turns",)),
    ("next_turn", "Does another turn follow?", ("next_turn",)),
    ("reuse", "When are blocks used again?", ("reuse",)),
    ("locality", "Which part of a prompt is worth keeping?", ("locality",)),
    ("lifespan", "How long is a block of use?", ("lifespan",)),
    ("footprint", "How much KV does a request leave?", ("footprint",)),
    ("capacity", "How much room does it take?", ("capacity",)),
)
_ABSENT = {
    "reuse": "Reuse",
    "turns": "Turns",
    "users": "Users",
    "conversations": "Conversations",
    "kinds": "Request types",
}


def write_report(report: TraceReport, out: Path) -> None:
    """Write ``report.html``, ``report.json`` and one PNG per figure into the folder ``out``.

    Raises ``CanopyError`` if a file cannot be written.
    """
    pictures = {name: png_bytes(figure) for name, figure in charts(report)}
    try:
        for name, data in pictures.items():
            (out / f"{name}.png").write_bytes(data)
        (out / "report.json").write_text(json.dumps(report.as_json()) + "\n")
        (out / "report.html").write_text(page(report, pictures), encoding="utf-8")
    except OSError as error:
        raise CanopyError(f"cannot write the report into {str(out)!r}: {error}") from None


def page(report: TraceReport, pictures: dict[str, bytes]) -> str:
    """Render the page, with its figures embedded."""
    found, overview = findings(report), report.overview
    return render(
        "characterize",
        title=f"Prefix reuse in {overview.path}",
        overview=found["overview"],
        blocks=count(overview.block_accesses),
        block_tokens=overview.block_tokens,
        distinct_blocks=count(overview.distinct_blocks),
        kinds=overview.kinds,
        notes=report.notes,
        sections=_sections(report, found, pictures),
        absent=[(_ABSENT.get(name, name), why) for name, why in report.absent.items()],
        version=__version__,
    )


def _sections(
    report: TraceReport, found: dict[str, str], pictures: dict[str, bytes]
) -> list[dict[str, Any]]:
    """Return one section for each question that the trace answers."""
    tables, sections = _tables(report), []
    for key, question, names in _QUESTIONS:
        if key not in found:
            continue
        sections.append(
            {
                "question": question,
                "finding": found[key],
                "figures": [as_data(pictures[name]) for name in names if name in pictures],
                "table": tables.get(key),
            }
        )
    return sections


def _tables(report: TraceReport) -> dict[str, HtmlTable]:
    made: dict[str, HtmlTable] = {}
    if report.hits and report.hits.kinds:
        made["hits"] = HtmlTable(
            ("request type", "of the requests", "of the hits", "own hit ratio"),
            [
                (k.name, percent(k.requests, 1), percent(k.hits, 1), percent(k.hit_ratio, 1))
                for k in report.hits.kinds
            ],
        )
    if report.reuse:
        made["reuse"] = HtmlTable(
            ("last user", "reuses", "P50", "P80", "P90", "ever reused", "exponential mean"),
            [
                (
                    r.name, count(r.reuses), seconds(r.p50_s), seconds(r.p80_s), seconds(r.p90_s),
                    percent(r.reused_by_end), seconds(r.mean_s),
                )
                for r in (report.reuse.all, *report.reuse.categories)
            ],
        )  # fmt: skip
    if report.footprint:
        made["footprint"] = HtmlTable(
            ("requests", "number", "mean tokens", "P50", "P90", "P99", "mean KV", "P50", "P99"),
            [
                (
                    r.name, count(r.requests), count(r.mean_tokens), count(r.p50_tokens),
                    count(r.p90_tokens), count(r.p99_tokens), size(r.mean_bytes),
                    size(r.p50_bytes), size(r.p99_bytes),
                )
                for r in report.footprint.rows
            ],
        )  # fmt: skip
    if report.capacity:
        c = report.capacity
        made["capacity"] = HtmlTable(
            ("of the ideal hits", "LRU needs", "blocks", "of the distinct blocks"),
            [
                (percent(s), size(b * c.block_bytes), count(b), percent(b / c.distinct_blocks, 1))
                for s, b in c.lru_for_share
            ],
        )
    return made
