"""Tables of docs/research/chunks-serving.md, out of what the benchmarks wrote."""

from __future__ import annotations

import json
from collections.abc import Callable
from statistics import mean, median, stdev
from typing import Any

from result_tables import ROOT, table

RESULTS = ROOT / "benchmark/chunk/results"
PLACES = ("turn 0", "turn 1", "turn 2, more documents", "turn 3", "turn 4, more documents")


def _lines(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (RESULTS / name).read_text("utf-8").splitlines()]


def any_order() -> str:
    """Prompt tokens to compute, by order of the documents."""
    rows = json.loads((RESULTS / "any_order.json").read_text("utf-8"))["rows"]
    lines = [
        [
            f"{row['chunks']} documents, Zipf {row['zipf']}, {row['prompts_held']} prompts held",
            *(f"{row['given'] / row[way]:.2f}" for way in ("sorted", "any", "placebo")),
        ]
        for row in rows
    ]
    return table(
        ["times fewer tokens than as given", "sorted", "`any`", "placebo"], lines, numbers=True
    )


def follow_up() -> str:
    """KL of later turns that go on from kept KV, and that fuse again."""
    rows, lines = _lines("follow_up.jsonl"), []
    for turn in (2, 3):
        own = [row for row in rows if row["turn"] == turn]
        pairs = [(row["kept"]["kl"], row["again"]["kl"]) for row in own]
        more = [a - b for a, b in pairs]
        lines.append(
            [
                f"turn {turn} of {len(own)} conversations",
                *(f"{mean(x):.4f}" for x in zip(*pairs)),
                f"{mean(more):+.4f} ({stdev(more) / len(more) ** 0.5:.4f})",
                *(f"{mean(row[way]['rows'] for row in own):.0f}" for way in ("kept", "again")),
            ]
        )
    heads = ["KL kept", "fused again", "difference (s.e.)", "tokens kept", "again"]
    return table(["", *heads], lines, numbers=True)


def turns() -> str:
    """Processor seconds of the server by turn, documents named and not."""
    rows = json.loads((RESULTS / "turns.json").read_text("utf-8"))["rows"]
    lengths = sorted({row["tokens"] for row in rows})

    def cell(pick: Callable[[dict[str, Any]], float], tokens: int) -> str:
        both = [
            median(pick(r) for r in rows if (r["tokens"], r["side"]) == (tokens, side))
            for side in ("documents", "plain")
        ]
        return f"{both[0]:.2f} / {both[1]:.2f}"

    picks: dict[str, Callable[[dict[str, Any]], float]] = {
        place: lambda row, i=i: row["cpu_s"][i] for i, place in enumerate(PLACES)
    }
    picks["the same prompt again"] = lambda row: row["retry_cpu_s"]
    picks["n = 4"] = lambda row: row["n4_cpu_s"]
    picks["n = 8"] = lambda row: row["n8_cpu_s"]
    lines = [[name, *(cell(pick, n) for n in lengths)] for name, pick in picks.items()]
    return table(["documents / plain", *map(str, lengths)], lines, numbers=True)


PARTS: dict[str, Callable[[], str]] = {
    "any-order": any_order,
    "follow-up": follow_up,
    "turns": turns,
}
