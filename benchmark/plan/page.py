"""Figures on plans in docs/research/planner.md and the guide."""

from __future__ import annotations

from typing import Any

from result_tables import load, percent, table

ROWS = "benchmark/plan/results/confidence.json"
METHOD = "probit of the distance"
"""Today's method."""


def pooled(rows: list[dict[str, Any]]) -> tuple[int, float, float, float]:
    """Return plans, and over them stated, held, and held of those that stated 90 % or more."""
    plans, sure = (sum(row[key] for row in rows) for key in ("plans", "sure"))
    stated, held = (sum(r["plans"] * r[key] for r in rows) / plans for key in ("stated", "held"))
    return plans, stated, held, sum(r["sure"] * (r["sure_held"] or 0) for r in rows) / sure


def _groups() -> dict[tuple[str, str, str], list[dict[str, Any]]]:
    found: dict[tuple[str, str, str], list[dict[str, Any]]] = {}
    for row in load(ROWS):
        found.setdefault((row["role"], row["metric"], row["method"]), []).append(row)
    return found


def confidence() -> str:
    """The confidence that plans state, and how often their limits hold on fresh logs."""
    lines = []
    for (role, metric, method), rows in sorted(_groups().items()):
        plans, *shares = pooled(rows)
        where = ", ".join(dict.fromkeys(row["population"] for row in rows))
        lines.append(
            [
                f"{role} ({where}), {metric}, {method}",
                str(plans),
                *(percent(share, 0) for share in shares),
            ]
        )
    heads = [
        "populations, limit, confidence",
        "plans",
        "stated",
        "held",
        "held, stated 90 % or more",
    ]
    return table(heads, lines, numbers=True)


def confidence_short() -> str:
    """The same in one sentence, of the judging populations and today's method."""
    texts = []
    for (role, metric, method), rows in _groups().items():
        if (role, method) == ("judged", METHOD) and metric != "p99_ttft":
            _, stated, held, sure = pooled(rows)
            texts.append(
                f"{metric}: {percent(stated, 0)} stated, {percent(held, 0)} held, and {percent(sure, 0)} of "
                "those that stated 90 % or more"
            )
    return "; ".join(texts)


PARTS = {"confidence": confidence, "confidence-short": confidence_short}
