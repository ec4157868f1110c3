"""What docs/research/chunks.md and chunks-serving.md say of free decoding and of the quality meter."""

from __future__ import annotations

import json
from statistics import mean, median
from typing import Any

from result_tables import ROOT, load, table

RESULTS = ROOT / "benchmark" / "chunk" / "results"
SETS = {"musique_100": "MuSiQue", "hotpotqa_100": "HotpotQA"}
WAYS = {
    "prefix": "`prefix`",
    "mixed": "`mixed`",
    "prefix+n3": "`prefix`, corrected, noise 3",
    "mixed+n3": "`mixed`, corrected, noise 3",
    "mixed+n1+w4": "`mixed`, corrected, 4 weights",
}


def answers() -> list[dict[str, Any]]:
    """One row a question, way and ratio, of the questions that every way has answered."""
    lines = (RESULTS / "free_decoding.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [row for row in map(json.loads, lines) if row["way"] in WAYS and row["ratio"] == 0.15]
    asked = [{(r["set"], r["number"]) for r in rows if r["way"] == way} for way in WAYS]
    everywhere = set.intersection(*asked)
    return [row for row in rows if (row["set"], row["number"]) in everywhere]


def free_decoding() -> str:
    """KL and answers of each way, questions and needles apart."""
    rows, lines = answers(), []
    for way, name in WAYS.items():
        mine = [row for row in rows if row["way"] == way]
        asked = [row for row in mine if row["set"] in SETS]
        hidden = [row for row in mine if row["set"] not in SETS]
        kept = [row["kept"] for row in hidden if row["right"]]
        lines.append([name, *_kl(asked), *_kl(hidden), f"{sum(kept)} of {len(kept)}"])
    first = [row for row in rows if row["way"] == "mixed"]
    count = sum(row["set"] in SETS for row in first)
    head = ["r = 0.15", f"{count} questions: KL", "worst", "same answer"]
    head += [f"{len(first) - count} needles: KL", "worst", "same answer", "right ones kept"]
    return table(head, lines)


def _kl(rows: list[dict[str, Any]]) -> list[str]:
    """Mean (and median), worst, and answers that are the same."""
    kl = [row["kl"] for row in rows]
    same = sum(row["same"] for row in rows)
    return [f"{mean(kl):.3f} ({median(kl):.3f})", f"{max(kl):.2f}", f"{same} of {len(rows)}"]


def meter() -> str:
    """The meter's run, step by step."""
    lines, before = [], {"checked": 0, "differed": 0}
    for row in load("benchmark/chunk/results/quality_meter.json")["rows"]:
        checks = [str(row[name] - before[name]) for name in ("checked", "differed")]
        lines.append([row["traffic"], f"{row['prompts']:,}", *checks, row["step"]])
        before = row
    return table(["traffic", "prompts of it", "checks", "of them differ", "the tenant is"], lines)


PARTS = {"free-decoding": free_decoding, "meter": meter}
