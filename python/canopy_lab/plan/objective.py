"""Metrics by name, sets of objectives, and the hypervolume of a front."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

import moocore
import numpy as np

from canopy_lab.plan.space import Configuration
from sglang_canopy.errors import CanopyError


@dataclass(frozen=True, slots=True)
class PlanRow:
    """A configuration, with its metrics and its cost by key."""

    configuration: Configuration
    metrics: Mapping[str, Any]
    predicted: bool = False
    """True if it was not simulated on the whole trace."""

    def __getitem__(self, key: str) -> Any:
        return self.metrics[key]

    def to_json(self) -> dict[str, Any]:
        """Return decision variables and metrics in one object."""
        prediction_mark = {"predicted": True} if self.predicted else {}
        return {**self.configuration.to_json(), **self.metrics, **prediction_mark}


@dataclass(frozen=True, slots=True)
class PlanMetric:
    """One metric of a row."""

    key: str
    """Key in the row."""
    name: str
    """Name on the command line."""
    unit: str
    """``s``, ``tokens/s``, ``money``, ``money/h`` or ``share``."""
    is_maximised: bool = False


METRICS = {
    m.name: m
    for m in (
        PlanMetric("mean_ttft_s", "mean_ttft", "s"),
        PlanMetric("p50_ttft_s", "p50_ttft", "s"),
        PlanMetric("p90_ttft_s", "p90_ttft", "s"),
        PlanMetric("p99_ttft_s", "p99_ttft", "s"),
        PlanMetric("mean_tpot_s", "mean_tpot", "s"),
        PlanMetric("mean_e2e_s", "mean_e2e", "s"),
        PlanMetric("throughput_tokens_per_s", "throughput", "tokens/s", is_maximised=True),
        PlanMetric("token_hit_ratio", "token_hit_ratio", "share", is_maximised=True),
        PlanMetric("cost", "cost", "money"),
        PlanMetric("cost_per_hour", "cost_per_hour", "money/h"),
    )
}
MIN_RELATIVE_RANGE = 0.01


def find_metric(name: str) -> PlanMetric:
    """Return the metric with that name or key. Raises ``CanopyError`` with the nearest name."""
    name = name.strip()
    if name in METRICS:
        return METRICS[name]
    for candidate in METRICS.values():
        if candidate.key == name:
            return candidate
    suggestions = get_close_matches(name, METRICS, n=1, cutoff=0.5)
    hint = f"; did you mean {suggestions[0]!r}?" if suggestions else ""
    raise CanopyError(f"unknown metric {name!r}; choose from: {', '.join(METRICS)}{hint}")


@dataclass(frozen=True, slots=True)
class Objectives:
    """Two or more metrics, all oriented so that less is better."""

    metrics: tuple[PlanMetric, ...]

    @classmethod
    def from_names(cls, names: Iterable[str]) -> Objectives:
        """Make objectives from names. Raises ``CanopyError``."""
        return cls(tuple(find_metric(name) for name in names))

    def vector(self, row: PlanRow) -> np.ndarray:
        """Return one number per objective; less is better."""
        return np.array([-row[m.key] if m.is_maximised else row[m.key] for m in self.metrics])

    def matrix(self, rows: Iterable[PlanRow]) -> np.ndarray:
        vectors = [self.vector(row) for row in rows]
        return np.array(vectors) if vectors else np.empty((0, len(self.metrics)))

    def front(self, rows: Sequence[PlanRow]) -> list[int]:
        """Return the indices of the non-dominated rows. Among equal rows, the first."""
        if not rows:
            return []
        return [int(i) for i in np.flatnonzero(moocore.is_nondominated(self.matrix(rows)))]


OBJECTIVES = Objectives.from_names(("mean_ttft", "throughput", "cost"))
"""Objectives of a plan's front."""


@dataclass(frozen=True, slots=True)
class Scale:
    """Objectives scaled to 0 (best seen) .. 1 (the reference point)."""

    best: np.ndarray
    reference: np.ndarray

    @classmethod
    def around(cls, points: np.ndarray, margin: float = 0.05) -> Scale:
        """Set the reference ``margin`` beyond the worst of each objective over ``points``.

        An objective that varies by less than ``MIN_RELATIVE_RANGE`` is scaled by ``MIN_RELATIVE_RANGE``.
        Otherwise insignificant differences would determine the volume.
        """
        best, worst = points.min(axis=0), points.max(axis=0)
        span = np.maximum(worst - best, np.maximum(np.abs(best) * MIN_RELATIVE_RANGE, 1e-9))
        return cls(best, best + span * (1 + margin))

    def __call__(self, points: np.ndarray) -> np.ndarray:
        return (points - self.best) / (self.reference - self.best)

    def hypervolume(self, points: np.ndarray) -> float:
        """Return the volume dominated by ``points``, as a share of the box to the reference."""
        if len(points) == 0:
            return 0.0
        scaled = self(np.asarray(points, dtype=float))
        # A point better than the best seen adds volume beyond the box.
        return float(moocore.hypervolume(scaled, ref=np.ones(scaled.shape[1])))
