"""A characterisation as one self-contained HTML page, and as JSON."""

from __future__ import annotations

import json
from pathlib import Path

from canopy_lab.characterize.charts import draw_charts
from canopy_lab.characterize.findings import findings
from canopy_lab.characterize.trace_report import TraceReport
from canopy_lab.report.html import HtmlPage, HtmlTable, Section, png_bytes
from canopy_lab.report.units import bytes_text, count_text, percent, seconds
from sglang_canopy.errors import CanopyError

_QUESTIONS = {
    "hits": "How much could be reused?",
    "skew": "Who has the reuse?",
    "turns": "How long are conversations?",
    "next_turn": "Does another turn follow?",
    "reuse": "When are blocks used again?",
    "capacity": "How much room does it take?",
}
_TITLES = {"kinds": "Request types"}


def write_report(report: TraceReport, out: Path) -> None:
    """Write ``report.html`` and ``report.json`` into the folder ``out``. Raises ``CanopyError``."""
    try:
        (out / "report.json").write_text(json.dumps(report.as_json()) + "\n")
        (out / "report.html").write_text(make_page(report).html(), encoding="utf-8")
    except OSError as error:
        raise CanopyError(f"cannot write the report into {str(out)!r}: {error}") from None


def make_page(report: TraceReport) -> HtmlPage:
    pictures = {n: png_bytes(figure) for n, figure in draw_charts(report)}
    sentences, overview, tables = findings(report), report.overview, _tables(report)
    blocks = (
        f"{count_text(overview.block_accesses)} blocks of {overview.block_tokens} tokens asked for, "
        f"{count_text(overview.distinct_blocks)} of them distinct. Request types: {', '.join(overview.kinds)}."
    )
    sections = [
        Section(question, [sentences[key]], pictures.get(key), table=tables.get(key))
        for key, question in _QUESTIONS.items()
        if key in sentences
    ]
    if report.absent:
        reasons = [f"{_TITLES.get(n, n.capitalize())}: {why}." for n, why in report.absent.items()]
        sections.append(Section("What this trace cannot say", points=reasons))
    return HtmlPage(
        f"Prefix reuse in {overview.path}", sections, lead=[sentences["overview"]], notes=[blocks, *report.notes],
        command="characterize",
        source=". The questions are those of Section 3 of arXiv 2506.02634; report.json beside this page has every number.",
    )  # fmt: skip


def _tables(report: TraceReport) -> dict[str, HtmlTable]:
    tables: dict[str, HtmlTable] = {}
    if report.hits and report.hits.kinds:
        tables["hits"] = HtmlTable(
            ("request type", "of the requests", "of the hits", "own hit ratio"),
            [
                (k.name, percent(k.requests, 1), percent(k.hits, 1), percent(k.hit_ratio, 1))
                for k in report.hits.kinds
            ],
        )
    if report.reuse:
        tables["reuse"] = HtmlTable(
            ("last user", "reuses", "P50", "P80", "P90", "ever reused", "exponential mean"),
            [
                (
                    r.name, count_text(r.reuses), seconds(r.p50_s), seconds(r.p80_s), seconds(r.p90_s),
                    percent(r.reused_by_end), seconds(r.mean_s),
                )
                for r in (report.reuse.all, *report.reuse.categories)
            ],
        )  # fmt: skip
    if report.capacity:
        c = report.capacity
        tables["capacity"] = HtmlTable(
            ("of the ideal hits", "LRU needs", "blocks", "of the distinct blocks"),
            [
                (percent(share), bytes_text(blocks * c.block_bytes), count_text(blocks),
                 percent(blocks / c.distinct_blocks, 1))
                for share, blocks in c.lru_for_share
            ],
        )  # fmt: skip
    return tables
