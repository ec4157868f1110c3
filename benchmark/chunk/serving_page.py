"""Tables of docs/research/chunks-serving.md from the benchmarks' result files."""

from __future__ import annotations

import json
from collections.abc import Callable
from statistics import mean, median, stdev
from typing import Any

from result_tables import ROOT, table

RESULTS = ROOT / "benchmark/chunk/results"


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
    """KL of later turns that continue from kept KV, and of turns that fuse again."""
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


SIDES = ("documents", "plain")


def turns() -> str:
    """Median seconds to the first token of each turn, of a retry, and until n answers end."""
    rows = json.loads((RESULTS / "turns.json").read_text("utf-8"))["rows"]
    lines = []
    for tokens in sorted({row["tokens"] for row in rows}):
        own = {
            side: [r for r in rows if (r["tokens"], r["side"]) == (tokens, side)] for side in SIDES
        }
        seconds = {side: _seconds(own[side]) for side in SIDES}
        for side in SIDES:
            of = f"{tokens:,} tokens, {side}, {len(own[side])} conversations"
            lines.append([of, *(f"{s:.2f}" for s in seconds[side])])
        share = [a / b for a, b in zip(*seconds.values())]
        lines.append([f"{tokens:,} tokens, documents / plain", *(f"{x:.2f}" for x in share)])
    heads = [*(f"turn {i}" for i in range(5)), "again", "n = 4", "n = 8"]
    return table(["", *heads], lines, numbers=True)


def _seconds(rows: list[dict[str, Any]]) -> list[float]:
    by_turn = zip(*(row["ttft_s"] for row in rows))
    others = ([row[name] for row in rows] for name in ("retry_s", "n4_s", "n8_s"))
    return [median(x) for x in (*by_turn, *others)]


def churn() -> str:
    """Counts of each run of documents under random operations."""
    rows = json.loads((RESULTS / "churn.json").read_text("utf-8"))["rows"]
    names = {
        "answered": "answers",
        "wrong": "exact answers that are wrong",
        "approximate": "answers with reuse that differ",
        "fused_requests": "requests that reuse documents",
        "kept_requests": "that extend kept KV",
        "samples": "prompts with n = 3",
        "aborts": "aborted",
        "retracted": "retractions",
        "replanned_requests": "retracted with documents",
        "updates": "updates of the weights",
        "exact_from_host": "exact KV from host memory",
        "kept_from_host": "kept KV from host memory",
        "exact_from_disk": "exact KV from disk",
        "kept_from_disk": "kept KV from disk",
        "documents_from_host": "documents from memory",
        "documents_from_disk": "documents from disk",
    }
    lines = [[title, *(str(row[name]) for row in rows)] for name, title in names.items()]
    return table(["", *(row["run"] for row in rows)], lines, numbers=True)


def ttft() -> str:
    """Time to the first token of pairs of requests, by reuse and by the prefix cache."""
    rows = json.loads((RESULTS / "ttft.json").read_text("utf-8"))["rows"]
    lines = []
    for row in rows:
        times = [row["all"]["prefix_s"], row["all"]["reuse_s"]]
        each = [a / b for a, b in zip(*times)]
        cpu = [a / b for a, b in zip(row["all"]["prefix_cpu_s"], row["all"]["reuse_cpu_s"])]
        of = f"{row['tokens']:,} tokens, {row['chunks']} documents, r = {row['ratio']}"
        numbers = [f"{median(each):.1f} ({min(each):.1f} to {max(each):.1f})", f"{median(cpu):.1f}"]
        lines.append([of, str(len(each)), *numbers])
    return table(["", "pairs", "times sooner", "times less CPU"], lines, numbers=True)


PARTS: dict[str, Callable[[], str]] = {
    "any-order": any_order,
    "churn": churn,
    "follow-up": follow_up,
    "ttft": ttft,
    "turns": turns,
}
