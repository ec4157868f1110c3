"""Table of docs/research/tests.md: what happened to SGLang's overlapped loop, and wrong answers."""

from __future__ import annotations

from collections import Counter

from result_tables import load

RESULTS = "benchmark/overlap/results/chaos.json"
COUNTED = ("came", "answered", "aborts", "exchanges", "pauses", "flushes", "retracted", "wrong")
HEADINGS = ("requests", *COUNTED[1:-1], "wrong answers")


def chaos() -> str:
    """Counts of each set-up, summed over seeds."""
    sums: dict[str, Counter[str]] = {}
    for life in load(RESULTS)["lives"]:
        counts = sums.setdefault(life["setup"], Counter())
        counts.update({key: life[key] for key in COUNTED})
    rows = [f"| {name} | {_cells(counts)} |" for name, counts in sums.items()]
    total = sum(sums.values(), Counter[str]())
    head = f"| set-up | {' | '.join(HEADINGS)} |"
    return "\n".join([head, f"|---|{'---:|' * len(COUNTED)}", *rows, f"| all | {_cells(total)} |"])


def _cells(counts: Counter[str]) -> str:
    return " | ".join(f"{counts[key]:,}" for key in COUNTED)


PARTS = {"chaos": chaos}
