"""Means over questions with standard errors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from comparators.quality import mean_se

Rows = dict[str, dict[str, Any]]


def by_arm(questions: Sequence[Rows]) -> Rows:
    """Every arm of the first question over the ``questions`` that have it: ``kl`` and where it was
    measured ``attention``, each with its standard error and by question (None: not measured); means
    of the rest; ``speedup``, CPU seconds of full recompute over the arm's."""
    found: Rows = {}
    for name in questions[0]:
        having = [question for question in questions if name in question]
        rows = [question[name] for question in having]
        full = sum(question["full"]["cpu_s"] for question in having)
        row: dict[str, Any] = {"questions": len(rows)}
        for field in ("kl", "attention"):
            known = [r[field] for r in rows if field in r]
            if known:
                row[field], row[f"{field}_se"] = (round(x, 4) for x in mean_se(known))
                values = [question.get(name, {}).get(field) for question in questions]
                row[f"{field}_by_question"] = [v if v is None else round(v, 4) for v in values]
        for field in ("top1", "run", "cpu_s"):
            row[field] = round(mean_se([r[field] for r in rows])[0], 4)
        row["speedup"] = round(full / sum(r["cpu_s"] for r in rows), 2)
        found[name] = row
    return found
