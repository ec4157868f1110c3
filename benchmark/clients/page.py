"""What docs/reference/clients.md says of agents with the client adapters, in numbers."""

from __future__ import annotations

from statistics import mean
from typing import Any

from result_tables import load, table

ARMS = {
    "without": "without an adapter",
    "hints": "with it",
    "placebo": "placebo: each hint of another agent",
}


def served() -> str:
    """Agents on a real server: hits and steps, by arm."""
    rows: list[dict[str, Any]] = load("benchmark/clients/results/served.json")
    lines = []
    for arm, label in ARMS.items():
        of = sorted((row for row in rows if row["arm"] == arm), key=lambda row: row["seed"])
        hits = [f"{100 * row['cached_tokens'] / row['prompt_tokens']:.1f}" for row in of]
        steps = [f"{row['steps']}" for row in of]
        mean_s = mean(row["mean_s"] for row in of)
        lines.append([label, ", ".join(hits), ", ".join(steps), f"{mean_s:.1f}"])
    return table(["by round", "token hits, %", "steps", "mean s a step"], lines, numbers=True)


PARTS = {"served": served}
