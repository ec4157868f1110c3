"""A characterisation as one HTML page that needs nothing else, with its figures and JSON beside."""

from __future__ import annotations

import base64
import html
import io
import json
import re
from collections.abc import Iterable
from pathlib import Path

from sglang_canopy import __version__
from sglang_canopy.characterize.report import Report
from sglang_canopy.errors import CanopyError
from sglang_canopy.report.characterize_charts import charts
from sglang_canopy.report.characterize_text import (
    advice,
    count,
    findings,
    percent,
    policy_name,
    seconds,
    size,
)

_QUESTIONS = (
    ("recommendation", "What to do", ("policies", "gain")),
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
_UNITS = re.compile(r"(\d) (%|(?:s|ms|min|h|[KMGT]iB|B)\b)")
_ABSENT = {
    "reuse": "Reuse",
    "turns": "Turns",
    "users": "Users",
    "conversations": "Conversations",
    "kinds": "Request types",
}
_STYLE = """
body{font:16px/1.5 system-ui,"DejaVu Sans",sans-serif;color:#222;max-width:60rem;margin:2rem auto;
padding:0 1rem}
h1{font-size:1.6rem;margin:0}h2{font-size:1.2rem;margin:2.2rem 0 .3rem;border-top:1px solid #d9d9d9;
padding-top:1rem}
p{margin:.4rem 0;max-width:48rem}img{width:100%;height:auto;margin:.6rem 0}
table{border-collapse:collapse;font-size:.85rem;margin:.6rem 0}
th,td{padding:.15rem .8rem .15rem 0;text-align:right;white-space:nowrap;border-bottom:1px solid #eee}
th{font-weight:600;color:#6b6b6b}th:first-child,td:first-child{text-align:left}
.small{color:#6b6b6b;font-size:.85rem}.box{background:#f2f7fb;border-left:4px solid #0072b2;
padding:.7rem 1rem;margin:1rem 0}.made{background:#fdf3ec;border-left-color:#d55e00}
.box ul{margin:.2rem 0;padding-left:1.2rem}.off{color:#d55e00;font-weight:600}
@media print{h2{break-after:avoid}img{break-inside:avoid}}
"""


def write_report(report: Report, out: Path) -> None:
    """Write ``report.html``, ``report.json`` and one PNG a figure into the folder ``out``.

    Raises ``CanopyError`` when a file cannot be written.
    """
    pictures: dict[str, bytes] = {}
    for name, figure in charts(report):
        buffer = io.BytesIO()
        figure.savefig(buffer, format="png")
        pictures[name] = buffer.getvalue()
    try:
        for name, data in pictures.items():
            (out / f"{name}.png").write_bytes(data)
        (out / "report.json").write_text(json.dumps(report.as_json()) + "\n")
        (out / "report.html").write_text(page(report, pictures), encoding="utf-8")
    except OSError as error:
        raise CanopyError(f"cannot write the report into {str(out)!r}: {error}") from None


def page(report: Report, pictures: dict[str, bytes]) -> str:
    """The page, figures included as data."""
    said = findings(report)
    o = report.overview
    title = f"Prefix reuse in {o.path}"
    parts = [
        "<!doctype html><html lang=en><meta charset=utf-8>",
        '<meta name=viewport content="width=device-width,initial-scale=1">',
        f"<title>{html.escape(title)}</title><style>{_STYLE}</style>",
        f"<h1>{html.escape(title)}</h1><p>{_say(said['overview'])}</p>",
        f"<p class=small>{count(o.block_accesses)} blocks of {o.block_tokens} tokens asked for, "
        f"{count(o.distinct_blocks)} of them distinct. Request types: "
        f"{html.escape(', '.join(o.kinds))}.</p>",
    ]
    if o.synthetic:
        parts.append(
            "<p class='box made'>This trace is synthetic: made by <code>canopy synth</code>, "
            "nobody sent these requests.</p>"
        )
    for note in report.notes:
        parts.append(f"<p class=small>{_say(note)}</p>")
    tables = _tables(report)
    for key, question, names in _QUESTIONS:
        if key not in said:
            continue
        parts.append(f"<h2>{question}</h2>")
        if key == "recommendation" and report.recommendation:
            rows = "".join(f"<li>{_say(a)}</li>" for a in advice(report.recommendation))
            parts.append(f"<div class=box><ul>{rows}</ul></div>")
        else:
            parts.append(f"<p>{_say(said[key])}</p>")
        for name in names:
            if name in pictures:
                data = base64.b64encode(pictures[name]).decode()
                parts.append(
                    f'<img alt="{html.escape(question)}" src="data:image/png;base64,{data}">'
                )
        parts.append(tables.get(key, ""))
    if report.published:
        parts.append("<h2>Against the published statistics</h2>" + _published(report))
    if report.absent:
        rows = "".join(
            f"<li>{_ABSENT.get(name, name)}: {_say(why)}.</li>"
            for name, why in report.absent.items()
        )
        parts.append(f"<h2>What this trace cannot say</h2><ul>{rows}</ul>")
    parts.append(
        f"<p class=small>Made by canopy characterize {__version__}. The questions are those of "
        "Section 3 of arXiv 2506.02634; report.json beside this page has every number.</p></html>"
    )
    return "\n".join(parts)


def _say(text: str) -> str:
    """``text`` for the page; a number and its unit stay on one line."""
    return _UNITS.sub("\\1&nbsp;\\2", html.escape(text))


def _table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    top = "".join(f"<th>{html.escape(h)}</th>" for h in head)
    body = "".join(
        "<tr>" + "".join(f"<td>{html.escape(c)}</td>" for c in row) + "</tr>" for row in rows
    )
    return f"<table><tr>{top}</tr>{body}</table>"


def _tables(report: Report) -> dict[str, str]:
    made: dict[str, str] = {}
    if report.hits and report.hits.kinds:
        made["hits"] = _table(
            ("request type", "of the requests", "of the hits", "own hit ratio"),
            (
                (k.name, percent(k.requests, 1), percent(k.hits, 1), percent(k.hit_ratio, 1))
                for k in report.hits.kinds
            ),
        )
    if report.reuse:
        made["reuse"] = _table(
            ("last user", "reuses", "P50", "P80", "P90", "ever reused", "exponential mean",
             "KS survival", "KS exponential", "log-lik. survival", "log-lik. exponential"),
            (
                (
                    r.name, count(r.reuses), seconds(r.p50_s), seconds(r.p80_s), seconds(r.p90_s),
                    percent(r.reused_by_end), seconds(r.mean_s),
                    f"{r.survival_fit.ks:.3f}" if r.survival_fit else "-",
                    f"{r.exponential_fit.ks:.3f}" if r.exponential_fit else "-",
                    f"{r.survival_fit.log_likelihood:.3f}" if r.survival_fit else "-",
                    f"{r.exponential_fit.log_likelihood:.3f}" if r.exponential_fit else "-",
                )
                for r in (report.reuse.all, *report.reuse.categories)
            ),
        ) + (
            "<p class=small>Both laws are fitted on one half of the requests and tested on the "
            "other, both ways round. KS is the largest gap between predicted and observed share "
            "(lower is better), the log-likelihood is per reuse (higher is better). Blocks that "
            "still wait at the end count as waiting, not as never reused.</p>"
        )  # fmt: skip
    if report.footprint:
        made["footprint"] = _table(
            ("requests", "number", "mean tokens", "P50", "P90", "P99", "mean KV", "P50", "P99"),
            (
                (
                    r.name, count(r.requests), count(r.mean_tokens), count(r.p50_tokens),
                    count(r.p90_tokens), count(r.p99_tokens), size(r.mean_bytes),
                    size(r.p50_bytes), size(r.p99_bytes),
                )
                for r in report.footprint.rows
            ),
        )  # fmt: skip
    if report.capacity:
        c = report.capacity
        made["capacity"] = _table(
            ("of the ideal hits", "LRU needs", "blocks", "of the distinct blocks"),
            (
                (percent(s), size(b * c.block_bytes), count(b), percent(b / c.distinct_blocks, 1))
                for s, b in c.lru_for_share
            ),
        )
    if report.recommendation:
        made["recommendation"] = _recommendation(report)
    return made


def _recommendation(report: Report) -> str:
    r = report.recommendation
    assert r is not None
    table = _table(
        (
            "token hit ratio at",
            *(f"{percent(f, 1)}, {size(b)}" for f, b in zip(r.fractions, r.capacity_bytes)),
        ),
        ((name, *(percent(v, 1) for v in row)) for name, row in r.table.items()),
    )
    notes = [
        f"Simulated: {policy_name(r)} and the others over {count(r.requests)} requests in blocks "
        f"of {r.block_tokens} tokens"
        + (", the beginning of the trace" if r.cut else "")
        + f". Capacities are shares of the {count(r.capacities[-1] / r.fractions[-1])} distinct "
        "blocks, those where LRU has "
        + ", ".join(percent(g.lru_share) for g in r.gains)
        + " of the ideal hits.",
        f"Intervals: {r.cluster_count} {r.clusters} drawn with replacement a thousand times, with "
        "what the simulator gave for each request; contention between other conversations is not "
        "redrawn.",
    ]
    if r.label_gain:
        notes.append(f"Categories, at {percent(r.label_fraction, 1)}: {r.categories_reason}.")
    return table + "".join(f"<p class=small>{_say(n)}</p>" for n in notes)


def _published(report: Report) -> str:
    rows = []
    for row in report.published:
        got = "not in this trace" if row.got is None else f"{row.got:.4g}"
        mark = {True: "within", False: "<span class=off>outside</span>", None: ""}[row.met]
        rows.append(
            "<tr>"
            + "".join(
                f"<td>{cell}</td>"
                for cell in (
                    html.escape(row.name), html.escape(row.published), got,
                    f"{row.low:g} to {row.high:g}", mark, html.escape(row.source),
                )
            )
            + "</tr>"
        )  # fmt: skip
    head = "".join(
        f"<th>{h}</th>" for h in ("", "published", "here", "taken as agreement", "", "source")
    )
    return f"<table><tr>{head}</tr>{''.join(rows)}</table>"
