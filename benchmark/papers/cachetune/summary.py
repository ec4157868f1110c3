"""Means over questions with standard errors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from comparators.quality import mean_se

Rows = dict[str, dict[str, Any]]


def by_arm(questions: Sequence[Rows]) -> Rows:
    """Every arm over the ``questions``: ``kl`` with its standard error and by question; means of the rest; ``speedup``, CPU seconds of full recompute
    over the arm's."""
    found: Rows = {}
    full = sum(question["full"]["cpu_s"] for question in questions)
    for name in questions[0]:
        rows = [question[name] for question in questions]
        row: dict[str, Any] = {}
        values = [r["kl"] for r in rows]
        row["kl"], row["kl_se"] = (round(x, 4) for x in mean_se(values))
        row["kl_by_question"] = [round(v, 4) for v in values]
        for field in ("top1", "run", "cpu_s"):
            row[field] = round(mean_se([r[field] for r in rows])[0], 4)
        row["speedup"] = round(full / sum(r["cpu_s"] for r in rows), 2)
        found[name] = row
    return found
