"""Tables of docs/research/chunks.md from the benchmarks' result files."""

from __future__ import annotations

import json
from collections.abc import Callable
from statistics import mean, stdev
from typing import Any

from canopy_chunks.quality.tenant_meter import TIE_NATS
from result_tables import ROOT, table

FILE = ROOT / "benchmark/chunk/results/free_decoding.jsonl"
BY_DOCUMENTS = ROOT / "benchmark/chunk/results/by_documents.jsonl"
MIN_PAIRS = 30
"""Questions of the smallest cell that is shown."""
QUESTIONS = {"musique_100": "MuSiQue", "hotpotqa_100": "HotpotQA"}
LENGTHS = ("n1k", "n2k", "n4k", "n8k")
SHOWN = (0.10, 0.15)
"""Ratios of the table of questions; 0.05 is in the file only."""
Rows = list[dict[str, Any]]


def decoded() -> Rows:
    """Return each way's rows for the questions that all ways have."""
    text = FILE.read_text(encoding="utf-8")
    rows = [r for r in map(json.loads, text.splitlines()) if r["way"]]
    ways = {(r["way"], r["ratio"]) for r in rows}
    had: dict[Any, int] = {}
    for r in rows:
        had[r["set"], r["number"]] = had.get((r["set"], r["number"]), 0) + 1
    return [r for r in rows if had[r["set"], r["number"]] == len(ways)]


def by_way(rows: Rows) -> dict[tuple[float, str], Rows]:
    """Rows by ratio and encoding, in the order of the tables."""
    keys = sorted({(r["ratio"], r["way"]) for r in rows}, key=lambda k: (k[0], k[1] != "prefix"))
    return {key: [r for r in rows if (r["ratio"], r["way"]) == key] for key in keys}


def same(rows: Rows) -> list[str]:
    """Answers equal to full recompute's; then also answers that differ only at a near tie."""
    equal = sum(r["margin"] is None for r in rows)
    near = sum(r["margin"] is not None and r["margin"] <= TIE_NATS for r in rows)
    return [str(equal), str(equal + near)]


def kept(rows: Rows) -> str:
    """Right answers of full recompute that reuse gives too."""
    right = [r for r in rows if r["right"]]
    return f"{sum(r['kept'] for r in right)} of {len(right)}"


def kl(rows: Rows) -> list[str]:
    """Mean and worst."""
    return [f"{mean(r['kl'] for r in rows):.3f}", f"{max(r['kl'] for r in rows):.2f}"]


def questions() -> str:
    """Answers equal to full recompute's, and KL, by set."""
    lines, rows = [], decoded()
    (of,) = {sum(r["set"] == name for r in rows) // len(by_way(rows)) for name in QUESTIONS}
    for name, title in QUESTIONS.items():
        for (ratio, way), found in by_way(rows).items():
            if ratio in SHOWN:
                mine = [r for r in found if r["set"] == name]
                lines.append([f"{title}, {ratio:.2f}: `{way}`", *same(mine), *kl(mine)])
    heads = (f"as full, of {of}", "or near", "KL", "worst")
    return table(["r", *heads], lines, numbers=True)


def needles() -> str:
    """Right answers kept, prompts of all lengths together."""
    rows = [r for r in decoded() if r["set"] in LENGTHS and r["right"]]
    lines = [
        [f"{ratio:.2f}: `{way}`", kept(found), *kl(found)]
        for (ratio, way), found in by_way(rows).items()
    ]
    return table(["r", "found", "KL", "worst"], lines, numbers=True)


def needles_short() -> str:
    """The guide's sentence: numbers found at the default ratio and encoding."""
    rows = [r for r in decoded() if r["set"] in LENGTHS and r["right"]]
    return f"at r = 0.15 finds {kept(by_way(rows)[0.15, 'mixed'])} numbers hidden in essays that it finds by itself"


def by_documents() -> str:
    """KL on chat prompts by length and way, of cells with at least ``MIN_PAIRS`` questions."""
    cells: dict[tuple[int, str], Rows] = {}
    for line in BY_DOCUMENTS.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        cells.setdefault((row["length"], row["way"]), []).append(row)
    lines = []
    for (length, way), rows in sorted(cells.items()):
        found = [row["kl"] for row in rows]
        if len(found) >= MIN_PAIRS:
            error = stdev(found) / len(found) ** 0.5
            first = sum(row["same_first"] for row in rows)
            cell = [f"{length} tokens, `{way}`", f"{mean(found):.3f} ({error:.3f})"]
            lines.append([*cell, f"{first} of {len(found)}"])
    return table(["", "KL (s.e.)", "same first token"], lines, numbers=True)


PARTS: dict[str, Callable[[], str]] = {
    "questions": questions,
    "by-documents": by_documents,
    "needles": needles,
    "needles-short": needles_short,
}
