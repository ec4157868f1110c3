"""Uncertainty of a plan: its choice's metrics in other traces like this one.

A trace is one draw. It is cut into blocks of consecutive requests, because slow requests are
clustered, and blocks are drawn with replacement (moving-block bootstrap, Künsch 1989). Each draw
has its own P99. The share of draws that meet the limits is the probability that they are met by
traffic that differs from this trace no more than the trace's parts differ from each other.
Consecutive windows of the trace show that difference.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from canopy_lab.plan.choice import Constraint
from canopy_lab.sim.system.result import SystemResult

DRAWS = 400
WINDOWS = 6
BLOCKS = 40
"""Approximate number of blocks of a trace."""
LEVEL = 0.9
"""Coverage of the intervals."""

_Statistic = Callable[[SystemResult, np.ndarray], float]


def _quantile(percent: float) -> _Statistic:
    return lambda result, at: float(np.percentile(result.ttft_s[at], percent))


_STATISTICS: Mapping[str, _Statistic] = {
    "mean_ttft_s": lambda result, at: float(result.ttft_s[at].mean()),
    "p50_ttft_s": _quantile(50),
    "p90_ttft_s": _quantile(90),
    "p99_ttft_s": _quantile(99),
    "mean_e2e_s": lambda result, at: float(result.e2e_s[at].mean()),
    "token_hit_ratio": lambda result, at: float(
        result.cached_tokens[at].sum() / max(result.prompt_tokens[at].sum(), 1)
    ),
}
"""Metrics that can be resampled, by row key."""
SHOWN = ("mean_ttft_s", "p99_ttft_s", "token_hit_ratio")


@dataclass(frozen=True, slots=True)
class Uncertainty:
    """Uncertainty of one configuration. Metrics by row key."""

    intervals: Mapping[str, tuple[float, float]]
    """Low and high ends that contain ``LEVEL`` of the draws."""
    windows: Mapping[str, tuple[float, ...]]
    """Value in each part of the trace."""
    met: float | None
    """Share of draws that meet all resampled limits; ``None`` without limits."""
    left_out: tuple[str, ...]
    """Limits on metrics of the whole run, which are not resampled."""
    block_requests: int

    def to_json(self) -> dict[str, Any]:
        """Return a JSON-able summary."""
        return {
            "level": LEVEL,
            "intervals": {name: list(pair) for name, pair in self.intervals.items()},
            "windows": {name: list(values) for name, values in self.windows.items()},
            "limits_met": self.met,
            "limits_left_out": list(self.left_out),
            "block_requests": self.block_requests,
        }


def uncertainty_of(
    result: SystemResult, constraints: Sequence[Constraint] = (), seed: int = 0
) -> Uncertainty:
    """Resample ``result``. Deterministic."""
    count = result.requests
    block = max(1, math.ceil(count / BLOCKS))
    limits = [c for c in constraints if c.metric.key in _STATISTICS]
    names = tuple(dict.fromkeys((*SHOWN, *(c.metric.key for c in limits))))
    order = np.argsort(result.due_s, kind="stable")
    draw = np.random.default_rng(seed)
    found: dict[str, list[float]] = {name: [] for name in names}
    met = 0
    for _ in range(DRAWS):
        starts = draw.integers(0, count - block + 1, size=math.ceil(count / block))
        at = order[(starts[:, None] + np.arange(block)).ravel()[:count]]
        row = {name: _STATISTICS[name](result, at) for name in names}
        for name, value in row.items():
            found[name].append(value)
        met += all(c.met(row) for c in limits)
    tails = (50 * (1 - LEVEL), 50 * (1 + LEVEL))
    parts = [part for part in np.array_split(order, WINDOWS) if len(part)]
    return Uncertainty(
        intervals={n: tuple(map(float, np.percentile(v, tails))) for n, v in found.items()},  # type: ignore[misc]
        windows={n: tuple(_STATISTICS[n](result, part) for part in parts) for n in names},
        met=met / DRAWS if limits else None,
        left_out=tuple(c.text for c in constraints if c not in limits),
        block_requests=block,
    )
