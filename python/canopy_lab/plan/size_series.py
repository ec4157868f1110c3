"""Series of evaluated configurations that differ in one size, and the midpoints between them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from canopy_lab.plan.objective import Objectives, PlanRow, Scale
from canopy_lab.plan.sizes import middle_size
from canopy_lab.plan.space import SIZE_FIELDS, Configuration, Space, slice_of

Rows = Mapping[Configuration, PlanRow]
LowerBounds = Callable[[Configuration, Sequence[PlanRow]], Mapping[str, float]]
"""Lower bounds by row key of an unevaluated configuration, from the rows beside it."""


@dataclass(frozen=True, slots=True)
class SizeSeries:
    """Evaluated configurations that differ in one size only."""

    axis: str
    base: Configuration
    """Any of the configurations, with that size set to 0."""
    by_size: tuple[tuple[float, Configuration], ...]
    """(size, configuration), ascending. The smallest size may be 0."""


@dataclass(frozen=True, slots=True)
class Midpoint:
    """A configuration between two evaluated ones."""

    configuration: Configuration
    bound: np.ndarray
    """Objectives if it equals the better of the two."""
    priority: float
    """Upper bound of the volume that it could add, more if the series bends there."""


def series_of(
    rows: Collection[Configuration], space: Space, slices: Collection[Configuration]
) -> list[SizeSeries]:
    """Return the series of ``rows`` with choices in ``slices``, in the order of ``rows``."""
    sizes_of: dict[tuple[str, Configuration], dict[float, Configuration]] = {}
    for c in rows:
        if slice_of(c) not in slices:
            continue
        for axis in SIZE_FIELDS:
            if axis == "disk_gib" and c.disk is None:
                continue
            if axis == "disk_mib_s" and c.disk not in space.bandwidths_mib_s:
                continue
            base = _zero_size(c, axis)
            sizes_of.setdefault((axis, base), {})[getattr(c, axis)] = c
    for (axis, base), by_size in sizes_of.items():
        if axis == "disk_gib":
            diskless = base.normalised()
            if diskless in rows:
                by_size[0.0] = diskless
    return [SizeSeries(*key, tuple(sorted(sizes.items()))) for key, sizes in sizes_of.items()]


def midpoints(
    all_series: Sequence[SizeSeries],
    rows: Rows,
    objectives: Objectives,
    scale: Scale,
    space: Space,
    bounds_of: LowerBounds | None,
) -> list[Midpoint]:
    """Return midpoints of gaps between adjacent sizes that could add to the front."""
    matrix = objectives.matrix(rows.values())
    front = matrix[objectives.front(list(rows.values()))]
    volume = scale.hypervolume(front)
    best: dict[Configuration, Midpoint] = {}
    for series in all_series:
        for middle, neighbours, bend in _gaps(series, rows, objectives, scale, space):
            configuration = _set_size(series, middle)
            if configuration in rows:
                continue
            bound = _bound(configuration, [rows[c] for c in neighbours], objectives, bounds_of)
            gain = scale.hypervolume(np.vstack([front, bound])) - volume
            if gain <= 1e-9 * max(volume, 1e-12):
                continue
            midpoint = Midpoint(configuration, bound, gain * (1 + bend))
            if configuration not in best or best[configuration].priority < midpoint.priority:
                best[configuration] = midpoint
    return list(best.values())


def series_through(point: Configuration, rows: Rows, space: Space) -> list[SizeSeries]:
    all_series = series_of(rows, space, {slice_of(c) for c in rows if _may_share_series(c, point)})
    return [series for series in all_series if any(c == point for _, c in series.by_size)]


def midpoints_beside(point: Configuration, rows: Rows, space: Space) -> list[Configuration]:
    """Return the midpoints between ``point`` and its next evaluated sizes, each once."""
    midpoints: dict[Configuration, None] = {}
    for series in series_through(point, rows, space):
        amounts, configurations = zip(*series.by_size)
        index = configurations.index(point)
        amount = amounts[index]
        sizes = [amounts[i] for i in (index - 1, index + 1) if 0 <= i < len(amounts)]
        if index == 0 and amount > 0 and series.axis != "disk_mib_s":
            sizes.append(0.0)
        for size in sizes:
            middle = middle_size(min(amount, size), max(amount, size), _min_size(series, space))
            if middle is not None:
                midpoints[_set_size(series, middle)] = None
    return list(midpoints)


def _may_share_series(c: Configuration, point: Configuration) -> bool:
    """Return whether ``c`` may lie on a series through ``point``."""
    return slice_of(c) == slice_of(point) or c.disk is None or point.disk is None


def _gaps(
    series: SizeSeries, rows: Rows, objectives: Objectives, scale: Scale, space: Space
) -> list[tuple[float, tuple[Configuration, ...], float]]:
    """Return a series' midpoints: (size, evaluated ends, curvature of the objectives there).

    A midpoint below the smallest size is included, for a choice that was tried only on large sizes:
    a smaller size is cheaper, and at best as good.
    """
    gaps: list[tuple[float, tuple[Configuration, ...], float]] = []
    min_gib = _min_size(series, space)
    bends = _curvature([scale(objectives.vector(rows[c])) for _, c in series.by_size])
    if series.by_size[0][0] > 0 and series.axis != "disk_mib_s":
        middle = middle_size(0.0, series.by_size[0][0], min_gib)
        if middle is not None:
            gaps.append((middle, (series.by_size[0][1],), 0.0))
    for index in range(len(series.by_size) - 1):
        (low_size, lower), (high_size, upper) = series.by_size[index], series.by_size[index + 1]
        middle = middle_size(low_size, high_size, min_gib)
        if middle is not None:
            gaps.append((middle, (lower, upper), max(bends[index], bends[index + 1])))
    return gaps


def _min_size(series: SizeSeries, space: Space) -> float:
    return 0.0 if series.axis == "disk_mib_s" else space.min_gib


def _bound(
    configuration: Configuration,
    neighbours: Sequence[PlanRow],
    objectives: Objectives,
    bounds_of: LowerBounds | None,
) -> np.ndarray:
    """Return the best possible objectives of ``configuration``, from the rows beside it and its price."""
    bound = objectives.matrix(neighbours).min(axis=0)
    if bounds_of is not None:
        lower_bounds = bounds_of(configuration, neighbours)
        for index, m in enumerate(objectives.metrics):
            if m.key in lower_bounds:
                bound[index] = -lower_bounds[m.key] if m.is_maximised else lower_bounds[m.key]
    return bound


def _zero_size(c: Configuration, axis: str) -> Configuration:
    zero: dict[str, Any] = {axis: 0.0}
    return replace(c, **zero)


def _set_size(series: SizeSeries, size: float) -> Configuration:
    change: dict[str, Any] = {series.axis: size}
    return replace(series.base, **change)


def _curvature(vectors: Sequence[np.ndarray]) -> list[float]:
    """Return the curvature of a series of objectives at each entry; 0 at its ends."""
    bends = [0.0] * len(vectors)
    for i in range(1, len(vectors) - 1):
        bends[i] = float(np.abs(vectors[i - 1] - 2 * vectors[i] + vectors[i + 1]).max())
    return bends
