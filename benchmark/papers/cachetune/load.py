"""Figure 8: TTFT against the request rate, from measured service times and a long queue."""

from __future__ import annotations

from typing import Any

import numpy as np
from artefact import Context

from cachetune import pictures
from cachetune.arms import Arm
from cachetune.measure import compare
from cachetune.parts import each
from cachetune.questions import questions

QUESTIONS = 4
ARMS = (
    Arm("random", 0.0, "alone"),
    *(Arm(name, encode="alone") for name in ("frequency", "hkvd", "epic", "question")),
)
REQUESTS = 20_000
LOADS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95)
"""Rates, as shares of each method's own saturation."""
TARGET = 2.0
"""The rate sustained is the largest whose 90th percentile is within this many times the time that
full recompute takes alone."""


def run(context: Context) -> dict[str, Any]:
    """One server, prefills in order of arrival, Poisson arrivals, service times drawn from those
    measured (CPU seconds of one thread)."""
    found = each(
        context,
        questions(context.data, "musique", QUESTIONS),
        lambda example: compare(example, ARMS, closeness=False),
    )
    rows = {}
    target = TARGET * float(np.mean([q["full"]["cpu_s"] for q in found]))
    for name in found[0]:
        times = np.array([question[name]["cpu_s"] for question in found])
        curve = [(load / times.mean(), *_quantiles(times, load / times.mean())) for load in LOADS]
        rows[name] = {
            "service_s": [round(float(t), 3) for t in times],
            "rate_p50_p90": [[round(float(x), 3) for x in point] for point in curve],
            "saturation": round(1 / times.mean(), 3),
            "sustained": round(_sustained(times, target), 3),
        }
    for field in ("saturation", "sustained"):
        base = rows["full"][field]
        for row in rows.values():
            row[f"{field}_times_full"] = round(row[field] / base, 2)
    pictures.rates(context.figure(), rows)
    return {"requests_a_point": REQUESTS, "target_p90_s": round(target, 2), "methods": rows}


def queue(times: np.ndarray, rate: float, requests: int = REQUESTS) -> np.ndarray:
    """``[requests]`` seconds of waiting and service, by Lindley's recursion; the seed is fixed."""
    draw = np.random.default_rng(0)
    service = draw.choice(times, requests)
    gaps = draw.exponential(1 / rate, requests)
    steps = np.concatenate([[0.0], service[:-1] - gaps[1:]]).cumsum()
    return steps - np.minimum.accumulate(steps) + service


def _quantiles(times: np.ndarray, rate: float) -> tuple[float, float]:
    ttft = queue(times, rate)
    return float(np.quantile(ttft, 0.5)), float(np.quantile(ttft, 0.9))


def _sustained(times: np.ndarray, target: float) -> float:
    """Bisect the rate: the 90th percentile grows with it, for equal draws."""
    low, high = 0.0, 1 / times.mean()
    for _ in range(20):
        rate = (low + high) / 2
        low, high = (rate, high) if _quantiles(times, rate)[1] <= target else (low, rate)
    return low
