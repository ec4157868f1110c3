"""What docs/reference/clients.md says of agents with the client adapters, in numbers."""

from __future__ import annotations

from typing import Any

from result_tables import load

ARMS = {
    "without": "without an adapter",
    "hints": "with it",
    "placebo": "with each hint of another agent",
}


def served() -> str:
    """Agents on a real server: hits by round, by arm."""
    rows: list[dict[str, Any]] = load("benchmark/clients/results/served.json")
    found = []
    for arm, label in ARMS.items():
        of = sorted((row for row in rows if row["arm"] == arm), key=lambda row: row["seed"])
        hits = [f"{100 * row['cached_tokens'] / row['prompt_tokens']:.1f}" for row in of]
        found.append(f"{' and '.join(hits)} % {label}")
    return ", ".join(found)


PARTS = {"served": served}
