"""Choose among configurations that were mostly simulated on a part of the trace only.

Only a configuration that was simulated on the whole trace can be chosen. A configuration is
excluded only if no value within its margin would make it the choice. Margins are calibrated on the
results of this run: for each metric, the logarithm of (whole / part) changes with distance at most
``SAFETY_FACTOR`` times as fast as between any two simulated configurations. Each simulated configuration
bounds all others; the narrowest bounds hold.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from canopy_lab.plan.choice import ChosenConfiguration, Constraint, choose
from canopy_lab.plan.objective import PlanMetric, PlanRow
from canopy_lab.plan.space import KNOBS, Configuration

BATCH_SIZE = 2
"""Configurations per batch. Fixed: results must not depend on the processes."""
SAFETY_FACTOR = 2.0
ANCHOR_COUNT = 8
"""Configurations simulated first: the predicted choice, then the farthest ones in turn. Otherwise
the prediction error would be known only near the choice."""
MIN_SLOPE = 0.05
"""Minimum change of a metric's logarithm per unit of distance, except for cost and throughput."""
MIN_SPAN_SLOPE, MAX_SPAN_SLOPE = 0.001, 0.01
"""Limits of this slope of cost and throughput: the relative spread of the predicted makespans.

The spread is small if the trace is served as fast as it arrives.
"""
MIN_DISTANCE = 0.5
_MIN_GIB = 2.0**-4
_CHOICE_DISTANCE, _INSTANCE_DISTANCE = 0.5, 2.0
"""Distance between configurations with a different choice, or number of instances."""

Evaluate = Callable[[Sequence[Configuration]], Sequence[PlanRow]]
Floats = NDArray[np.float64]


@dataclass(slots=True)
class ScreeningResult:
    """Result of ``confirm``."""

    choice: ChosenConfiguration
    rows: dict[Configuration, PlanRow]
    """Rows simulated on the whole trace, in order."""
    predicted: dict[Configuration, PlanRow] = field(default_factory=dict)
    """Predicted rows of all candidates."""


def confirm(
    predicted: Mapping[Configuration, PlanRow],
    evaluate: Evaluate,
    constraints: Sequence[Constraint],
    minimise: PlanMetric,
    rows: Mapping[Configuration, PlanRow] | None = None,
    progress: Callable[[int], None] | None = None,
    required: Sequence[Configuration] = (),
) -> ScreeningResult:
    """Simulate candidates until no other candidate could be the choice.

    ``rows`` were simulated already. ``required`` is simulated first, whatever its prediction. If the
    margins hold, the choice equals that of ``choose`` over all candidates.
    """
    # Rows without a prediction have been simulated, and may be chosen too.
    candidates = list(predicted)
    result = ScreeningResult(
        choice=ChosenConfiguration(next(iter(predicted.values())), False),
        rows=dict(rows or {}),
        predicted=dict(predicted),
    )
    metrics = tuple(dict.fromkeys((minimise, *(c.metric for c in constraints))))
    margins = Margins(predicted, metrics)
    while True:
        simulated = [c for c in candidates if c in result.rows]
        if result.rows:
            result.choice = choose(list(result.rows.values()), constraints, minimise)
        bounds = margins.bounds(result.rows, simulated)
        unsimulated = [i for i, c in enumerate(candidates) if c not in result.rows]
        possible = _possible_choices(bounds, unsimulated, result, constraints, minimise)
        missing = [c for c in required if c not in result.rows]
        if unsimulated and len(simulated) < ANCHOR_COUNT:
            first = _next_batch(bounds, unsimulated, constraints, minimise)[0]
            fixed = [*simulated, *(c for c in missing if c in predicted and c != candidates[first])]
            anchors = margins.anchors(fixed, first, min(ANCHOR_COUNT, len(candidates)))
            batch = list(dict.fromkeys((*missing, *(candidates[i] for i in anchors))))
        elif missing:
            batch = missing
        elif possible:
            batch = [candidates[i] for i in _next_batch(bounds, possible, constraints, minimise)]
        else:
            return result
        result.rows.update(zip(batch, evaluate(batch)))
        if progress is not None:
            progress(len(result.rows))


@dataclass(frozen=True, slots=True)
class Bounds:
    """Bounds of one metric, one entry per candidate."""

    low: Floats
    middle: Floats
    high: Floats


class Margins:
    """Error margins of the predictions."""

    def __init__(
        self, predicted: Mapping[Configuration, PlanRow], metrics: Sequence[PlanMetric]
    ) -> None:
        self._index_of = {c: i for i, c in enumerate(predicted)}
        self._metrics = metrics
        tiny = 1e-9
        self._logs = {
            metric.key: np.log(np.array([max(row[metric.key], tiny) for row in predicted.values()]))
            for metric in metrics
        }
        self._sizes = np.array(
            [
                [math.log2(max(c.dram_gib, _MIN_GIB)), math.log2(max(c.disk_gib, _MIN_GIB)),
                 math.log2(max(c.disk_mib_s, 1.0))]
                for c in predicted
            ]
        ) * (0.5, 0.25, 0.5)  # fmt: skip
        names = ("disk", *(knob.name for knob in KNOBS))
        self._choices = [np.array([str(getattr(c, name)) for c in predicted]) for name in names]
        self._instances = np.array([c.instances for c in predicted])
        makespans_s = [row.metrics.get("makespan_s", 1.0) for row in predicted.values()]
        relative_spread = max(makespans_s) / max(min(makespans_s), 1e-9) - 1
        self._span_slope = min(max(relative_spread, MIN_SPAN_SLOPE), MAX_SPAN_SLOPE)

    def bounds(
        self, rows: Mapping[Configuration, PlanRow], simulated: Sequence[Configuration]
    ) -> dict[str, Bounds]:
        """Return the bounds of every candidate, by metric key, from the rows of ``simulated``."""
        indices = np.array([self._index_of[c] for c in simulated], np.int64)
        bounds = {}
        for metric in self._metrics:
            logs = self._logs[metric.key]
            if not len(indices):
                bounds[metric.key] = Bounds(np.full(len(logs), -math.inf), np.exp(logs), np.full(len(logs), math.inf))  # fmt: skip
                continue
            distance = np.stack([self._distance(int(i), logs) for i in indices])
            errors = np.log([max(rows[c][metric.key], 1e-9) for c in simulated]) - logs[indices]
            gaps = distance[:, indices]
            spread = np.abs(errors[:, None] - errors[None, :])
            slope = max(self._min_slope(metric), SAFETY_FACTOR * float((spread / gaps).max()))
            low = (errors[:, None] - slope * distance).max(axis=0)
            high = (errors[:, None] + slope * distance).min(axis=0)
            low, high = np.minimum(low, high), np.maximum(low, high)
            middle = (errors[:, None] / distance**2).sum(axis=0) / (1 / distance**2).sum(axis=0)
            middle = np.clip(middle, low, high)
            bounds[metric.key] = Bounds(*(np.exp(logs + part) for part in (low, middle, high)))
        return bounds

    def _min_slope(self, metric: PlanMetric) -> float:
        if metric.key == "cost_per_hour":
            return 1e-6  # known, except for charges by use
        depends_on_makespan = metric.key in ("cost", "throughput_tokens_per_s")
        return self._span_slope if depends_on_makespan else MIN_SLOPE

    def anchors(self, simulated: Sequence[Configuration], first: int, count: int) -> list[int]:
        """Return ``first``, then the farthest candidates in turn, up to ``count`` with ``simulated``."""
        logs = next(reversed(self._logs.values()))
        given = [self._index_of[c] for c in simulated]
        anchors = [first]
        while len(given) + len(anchors) < count:
            distance = np.stack([self._distance(i, logs) for i in (*given, *anchors)]).min(axis=0)
            distance[[*given, *anchors]] = -1.0
            anchors.append(int(distance.argmax()))
        return anchors

    def _distance(self, index: int, logs: Floats) -> Floats:
        """Return one candidate's distances to all. Rows with similar predictions are near."""
        distance = np.abs(self._sizes - self._sizes[index]).sum(axis=1) + np.abs(logs - logs[index])
        distance += _INSTANCE_DISTANCE * (self._instances != self._instances[index])
        for values in self._choices:
            distance += _CHOICE_DISTANCE * (values != values[index])
        return np.maximum(distance, MIN_DISTANCE)


def _best(bounds: Mapping[str, Bounds], metric: PlanMetric, index: int) -> float:
    metric_bounds = bounds[metric.key]
    return float(metric_bounds.high[index] if metric.is_maximised else metric_bounds.low[index])


def _possible_choices(
    bounds: Mapping[str, Bounds],
    candidates: Sequence[int],
    result: ScreeningResult,
    constraints: Sequence[Constraint],
    minimise: PlanMetric,
) -> list[int]:
    """Return the candidates that could replace the current choice."""
    if not result.rows:
        return list(candidates)
    row, possible = result.choice.row, []
    sign = -1.0 if minimise.is_maximised else 1.0
    total_miss = sum(c.shortfall(row) for c in constraints)
    # Values within a thousandth count as equal; the cheaper row is then chosen.
    worst_winning = sign * row[minimise.key] + (abs(row[minimise.key]) * 1e-3 if minimise.key != "cost" else 0.0)  # fmt: skip
    for i in candidates:
        miss = sum(c.shortfall({c.metric.key: _best(bounds, c.metric, i)}) for c in constraints)
        if result.choice.is_feasible:
            if not miss and sign * _best(bounds, minimise, i) <= worst_winning:
                possible.append(i)
        elif miss <= total_miss:
            possible.append(i)
    return possible


def _next_batch(
    bounds: Mapping[str, Bounds],
    possible: Sequence[int],
    constraints: Sequence[Constraint],
    minimise: PlanMetric,
) -> list[int]:
    """Return the next candidates to simulate, the likeliest choice first."""
    sign = -1.0 if minimise.is_maximised else 1.0

    def sort_key(i: int) -> tuple[float, float, int]:
        miss = sum(
            c.shortfall({c.metric.key: float(bounds[c.metric.key].middle[i])}) for c in constraints
        )
        return (miss, sign * float(bounds[minimise.key].middle[i]), i)

    return sorted(possible, key=sort_key)[:BATCH_SIZE]
