"""Uncertainty of a plan: its choice's metrics in other traces of the same population.

A trace is one draw of periods and of conversations. Each resampled trace draws periods with
replacement, and within each drawn period its conversations with replacement (a two-stage cluster
bootstrap; Davison and Hinkley 1997, section 3.8), both twice: the trace and a fresh one are two draws
of one population. Periods keep bursts together; conversations keep
turns together, whose times are alike. Periods are days if the trace has enough of them. Each draw has
its own P99. Consecutive windows of the trace show how its parts differ.

The share of draws that meet a limit is too high for a choice: a plan exists, and is cheap, on traces
whose P99 is low by chance. The confidence is therefore a probit of the limit's distance in standard
deviations of the draws' logarithms, with coefficients fitted on simulated plans and judged on other
populations (``benchmark/plan/confidence.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

import numpy as np

from canopy_lab.plan.choice import Constraint
from canopy_lab.sim.system.result import SystemResult
from canopy_lab.trace.record import TraceRequest

DRAWS = 400
WINDOWS = 6
PERIODS = 40
"""Number of periods if the trace has few days."""
MIN_DAYS = 5
"""Minimum days of a trace whose periods are days."""
_DAY_S = 86400.0
SLOPE, SHIFT = 0.5, 0.15
"""Probit of the confidence, fitted on chats and bursts of ``benchmark/plan/confidence.py``."""
CALIBRATED = ("mean_ttft_s", "p90_ttft_s")
"""Metrics whose confidence held on the populations that judge; that of P99 did not."""
LEVEL = 0.9
"""Coverage of the intervals."""

_Statistic = Callable[[SystemResult, np.ndarray], float]


def _quantile(percent: float) -> _Statistic:
    return lambda result, at: float(np.percentile(result.ttft_s[at], percent))


STATISTICS: Mapping[str, _Statistic] = {
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
    """Uncertainty of one configuration, by metric (row key)."""

    intervals: Mapping[str, tuple[float, float]]
    """Low and high ends that contain ``LEVEL`` of the draws."""
    windows: Mapping[str, tuple[float, ...]]
    """Value in each part of the trace."""
    met: float | None
    """Confidence in the least sure of the resampled limits; ``None`` without limits."""
    uncalibrated: tuple[str, ...]
    """Limits on metrics that ``CALIBRATED`` lacks: ``met`` is a margin there, not a confidence."""
    left_out: tuple[str, ...]
    """Limits on metrics of the whole run, which are not resampled."""
    conversations: int
    """Conversations that were resampled."""
    periods: str
    """Number and kind of the periods: ``40 parts`` or ``12 days``."""

    def to_json(self) -> dict[str, Any]:
        """Return a JSON-able summary."""
        return {
            "level": LEVEL,
            "intervals": {name: list(pair) for name, pair in self.intervals.items()},
            "windows": {name: list(values) for name, values in self.windows.items()},
            "limits_met": self.met,
            "limits_uncalibrated": list(self.uncalibrated),
            "limits_left_out": list(self.left_out),
            "conversations": self.conversations,
            "periods": self.periods,
        }


def uncertainty_of(
    result: SystemResult,
    constraints: Sequence[Constraint] = (),
    conversations: np.ndarray | None = None,
    seed: int = 0,
) -> Uncertainty:
    """Resample ``result``. Deterministic.

    ``conversations``: number of each request's conversation; by default each request is one.
    """
    limits = [c for c in constraints if c.metric.key in STATISTICS]
    names = tuple(dict.fromkeys((*SHOWN, *(c.metric.key for c in limits))))
    draw = np.random.default_rng(seed)
    resampled = Resampling(
        result.due_s, np.arange(result.requests) if conversations is None else conversations
    )
    found: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(DRAWS):
        at = resampled.draw(draw)
        row = {name: STATISTICS[name](result, at) for name in names}
        for name, value in row.items():
            found[name].append(value)
    tails = (50 * (1 - LEVEL), 50 * (1 + LEVEL))
    order = np.argsort(result.due_s, kind="stable")
    parts = [part for part in np.array_split(order, WINDOWS) if len(part)]
    return Uncertainty(
        intervals={n: tuple(map(float, np.percentile(v, tails))) for n, v in found.items()},  # type: ignore[misc]
        windows={n: tuple(STATISTICS[n](result, part) for part in parts) for n in names},
        met=min(
            (
                _confidence(c, STATISTICS[c.metric.key](result, order), found[c.metric.key])
                for c in limits
            ),
            default=None,
        ),
        uncalibrated=tuple(c.text for c in limits if c.metric.key not in CALIBRATED),
        left_out=tuple(c.text for c in constraints if c not in limits),
        conversations=resampled.conversations,
        periods=resampled.periods,
    )


def _confidence(limit: Constraint, value: float, draws: Sequence[float]) -> float:
    """Return the probability that a fresh trace meets ``limit``. ``value``: of this trace."""
    ends = np.log(np.maximum([limit.limit, value, *draws], 1e-12))
    spread = float(np.std(ends[2:]))
    if spread < 1e-9:  # all draws are alike
        return float(limit.met({limit.metric.key: value}))
    margin = float(ends[0] - ends[1]) if limit.at_most else float(ends[1] - ends[0])
    return NormalDist().cdf(SLOPE * margin / spread + SHIFT)


class Resampling:
    """Draws of a trace's requests: periods twice, and in each drawn period its conversations twice.

    A resample of a resample differs from this trace as a fresh trace of the population does.
    """

    def __init__(self, due_s: np.ndarray, conversations: np.ndarray) -> None:
        _, self._of = np.unique(conversations, return_inverse=True)
        self.conversations = int(self._of.max()) + 1
        starts = np.full(self.conversations, np.inf)
        np.minimum.at(starts, self._of, due_s)
        self._order = np.argsort(starts, kind="stable")
        days = np.floor((starts[self._order] - starts.min()) / _DAY_S)
        ends = np.flatnonzero(np.diff(days, append=np.inf)) + 1
        count, self.periods = len(ends), f"{len(ends)} days"
        if count < MIN_DAYS:
            count = min(PERIODS, self.conversations)
            ends = np.arange(1, count + 1) * self.conversations // count
            self.periods = f"{count} parts"
        self._sizes = np.diff(ends, prepend=0)
        self._begins = ends - self._sizes

    def draw(self, draw: np.random.Generator) -> np.ndarray:
        """Return the requests of one draw."""
        count = len(self._sizes)
        periods = draw.integers(0, count, count)[draw.integers(0, count, count)]
        sizes = self._sizes[periods]
        size, total = np.repeat(sizes, sizes), int(sizes.sum())
        once = np.repeat(self._begins[periods], sizes) + (draw.random(total) * size).astype(int)
        block = np.repeat(np.cumsum(sizes) - sizes, sizes)
        twice = once[block + (draw.random(total) * size).astype(int)]
        times = np.bincount(self._order[twice], minlength=self.conversations)
        return np.repeat(np.arange(len(self._of)), times[self._of])


def conversations_of(trace: Sequence[TraceRequest], next_turn: Sequence[int]) -> np.ndarray:
    """Return the number of each request's conversation: by name, or by the links of its turns.

    ``next_turn``: index of the request that continues each request; negative for none.
    """
    numbers = np.full(len(trace), -1)
    named: dict[tuple[str | None, str], int] = {}
    for at, request in enumerate(trace):
        if request.conversation is not None:
            numbers[at] = named.setdefault((request.user, request.conversation), at)
        elif numbers[at] < 0:
            numbers[at] = at
        following = next_turn[at]
        if following >= 0:
            numbers[following] = numbers[at]
    return numbers
