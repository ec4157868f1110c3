"""Means with standard errors, and paired differences with 95 % bootstrap intervals."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from comparators.quality import mean_se

DRAWS = 4000
Rows = dict[str, dict[str, Any]]


def interval(values: Sequence[float]) -> list[float]:
    """``[low, high]``: the 95 % percentile-bootstrap interval of the mean; the seed is fixed."""
    all_values = np.asarray(values, dtype=float)
    picks = np.random.default_rng(0).integers(0, len(all_values), (DRAWS, len(all_values)))
    low, high = np.quantile(all_values[picks].mean(axis=1), [0.025, 0.975])
    return [round(float(low), 4), round(float(high), 4)]


def by_arm(questions: Sequence[Rows]) -> Rows:
    """Every arm over the questions: means; ``kl_by_question``; ``kl_se``; ``f1_ci``; ``speedup`` (CPU seconds of full
    recompute over the arm's); ``minus_random`` and ``minus_none``: paired differences of KL to
    random tokens at the same ratio and encoding, and to no recompute, with intervals."""
    found: Rows = {}
    for name in questions[0]:
        rows = [question[name] for question in questions]
        row: dict[str, Any] = {}
        row["kl"], row["kl_se"] = (round(x, 4) for x in mean_se([r["kl"] for r in rows]))
        row["kl_by_question"] = [round(r["kl"], 4) for r in rows]
        for field in ("top1", "run", "cpu_s", "f1", "rouge_l", "right", "tokens"):
            if field in rows[0]:
                row[field] = round(mean_se([r[field] for r in rows])[0], 4)
        if "f1" in row:
            row["f1_ci"] = interval([r["f1"] for r in rows])
            row["right_n"] = int(sum(r["right"] for r in rows))
        full = sum(question["full"]["cpu_s"] for question in questions)
        row["speedup"] = round(full / sum(r["cpu_s"] for r in rows), 2)
        for field, other in _compared(name, questions[0]):
            pairs = [q[name]["kl"] - q[other]["kl"] for q in questions]
            row[field] = [round(float(np.mean(pairs)), 4), *interval(pairs)]
        found[name] = row
    return found


def _compared(name: str, known: Rows) -> list[tuple[str, str]]:
    """The fields of paired differences of an arm, and the arm on the other side."""
    if name == "full" or " r=" in name or name.startswith("no recompute"):
        return []
    how = name.rsplit(", ", 1)[1]
    pairs = [("minus_random", f"random, {how}"), ("minus_none", f"no recompute, {how}")]
    return [(field, other) for field, other in pairs if other in known and other != name]
