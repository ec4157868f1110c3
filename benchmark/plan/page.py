"""Figures on plans in docs/research/planner.md and the guide."""

from __future__ import annotations

from statistics import mean
from typing import Any

from result_tables import load, percent, table


def _groups() -> dict[tuple[int, str], list[dict[str, Any]]]:
    """Return the plans by conversations in their log and by method of resampling."""
    found: dict[tuple[int, str], list[dict[str, Any]]] = {}
    for row in load("benchmark/plan/results/confidence.json"):
        found.setdefault((row["conversations"], row["method"]), []).append(row)
    return found


def confidence() -> str:
    """The confidence that plans state, and how often their limits hold on fresh logs."""
    lines = [
        [
            f"{conversations}, {method}",
            str(len(rows)),
            str(rows[0]["fresh"]),
            percent(mean(row["said"] for row in rows), 0),
            percent(mean(row["held"] for row in rows), 0),
            percent(min(row["held"] for row in rows), 0),
        ]
        for (conversations, method), rows in _groups().items()
    ]
    heads = ["conversations, what is resampled", "plans", "fresh logs of each"]
    return table([*heads, "stated", "held", "held, worst plan"], lines, numbers=True)


def confidence_short() -> str:
    """The same in one sentence, of today's method."""
    texts = [
        f"with {conversations} conversations {percent(mean(r['said'] for r in rows), 0)} were stated "
        f"and {percent(mean(r['held'] for r in rows), 0)} held"
        for (conversations, method), rows in _groups().items()
        if method.startswith("periods")
    ]
    return "; ".join(texts)


PARTS = {"confidence": confidence, "confidence-short": confidence_short}
