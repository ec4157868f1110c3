"""Lines of evaluated configurations that differ in one size, and the midpoints between them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from canopy_lab.plan.objective import Evaluated, Objectives, Scale
from canopy_lab.plan.sizes import middle_size
from canopy_lab.plan.space import SIZES, Configuration, Space, slice_of

Rows = Mapping[Configuration, Evaluated]
Certain = Callable[[Configuration, Sequence[Evaluated]], Mapping[str, float]]
"""Lower bounds by row key of an unevaluated configuration, from neighbours' rows."""


@dataclass(frozen=True, slots=True)
class Line:
    """Evaluated configurations that differ in one size only."""

    axis: str
    base: Configuration
    """Any of the configurations, with that size set to 0."""
    points: tuple[tuple[float, Configuration], ...]
    """Ascending by size. The smallest size may be 0."""


@dataclass(frozen=True, slots=True)
class Midpoint:
    """A configuration between two evaluated ones."""

    configuration: Configuration
    bound: np.ndarray
    """Objectives if it equals the better of the two neighbours."""
    priority: float
    """Upper bound of the volume that it could add, more if the line bends there."""


def lines_of(
    rows: Collection[Configuration], space: Space, slices: Collection[Configuration]
) -> list[Line]:
    """Return the lines through ``rows`` with choices in ``slices``, by their first point."""
    lines: dict[tuple[str, Configuration], dict[float, Configuration]] = {}
    for c in rows:
        if slice_of(c) not in slices:
            continue
        for axis in SIZES:
            if axis == "disk_gib" and c.disk is None:
                continue
            if axis == "disk_mib_s" and c.disk not in space.speeds:
                continue
            base = _zero_size(c, axis)
            lines.setdefault((axis, base), {})[getattr(c, axis)] = c
    for (axis, base), points in lines.items():
        if axis == "disk_gib":
            diskless = base.normal()
            if diskless in rows:
                points[0.0] = diskless
    return [Line(axis, base, tuple(sorted(p.items()))) for (axis, base), p in lines.items()]


def midpoints(
    lines: Sequence[Line],
    rows: Rows,
    objectives: Objectives,
    scale: Scale,
    space: Space,
    certain_of: Certain | None,
) -> list[Midpoint]:
    """Return midpoints of the lines' gaps that could add to the front."""
    points = objectives.matrix(rows.values())
    front = points[objectives.front(list(rows.values()))]
    volume = scale.hypervolume(front)
    by_point: dict[Configuration, Midpoint] = {}
    for line in lines:
        for middle, ends, bend in _gaps(line, rows, objectives, scale, space):
            point = _set_size(line, middle)
            if point in rows:
                continue
            bound = _bound(point, [rows[end] for end in ends], objectives, certain_of)
            gain = scale.hypervolume(np.vstack([front, bound])) - volume
            if gain <= 1e-9 * max(volume, 1e-12):
                continue
            mid = Midpoint(point, bound, gain * (1 + bend))
            if point not in by_point or by_point[point].priority < mid.priority:
                by_point[point] = mid
    return list(by_point.values())


def lines_through(point: Configuration, rows: Rows, space: Space) -> list[Line]:
    lines = lines_of(rows, space, {slice_of(c) for c in rows if _share_line(c, point)})
    return [line for line in lines if any(c == point for _, c in line.points)]


def neighbours_of(point: Configuration, rows: Rows, space: Space) -> list[Configuration]:
    """Return the midpoints between ``point`` and its next evaluated sizes, each once."""
    neighbours: dict[Configuration, None] = {}
    for line in lines_through(point, rows, space):
        index = [c for _, c in line.points].index(point)
        amount = line.points[index][0]
        sizes = [line.points[i][0] for i in (index - 1, index + 1) if 0 <= i < len(line.points)]
        if index == 0 and amount > 0 and line.axis != "disk_mib_s":
            sizes.append(0.0)
        for size in sizes:
            middle = middle_size(min(amount, size), max(amount, size), _min_size(line, space))
            if middle is not None:
                neighbours[_set_size(line, middle)] = None
    return list(neighbours)


def _share_line(c: Configuration, point: Configuration) -> bool:
    """Return whether ``c`` may lie on a line through ``point``."""
    own_slice, point_slice = slice_of(c), slice_of(point)
    return own_slice == point_slice or c.disk is None or point.disk is None


def _gaps(
    line: Line, rows: Rows, objectives: Objectives, scale: Scale, space: Space
) -> list[tuple[float, tuple[Configuration, ...], float]]:
    """Return the midpoints of a line's gaps: (size, evaluated ends, curvature of the line there).

    A midpoint below the lowest point is included, for a choice that was tried only on large sizes:
    a smaller size is cheaper, and at best as good as the lowest point.
    """
    gaps: list[tuple[float, tuple[Configuration, ...], float]] = []
    min_gib = _min_size(line, space)
    bends = _curvature([scale(objectives.vector(rows[c])) for _, c in line.points])
    if line.points[0][0] > 0 and line.axis != "disk_mib_s":
        middle = middle_size(0.0, line.points[0][0], min_gib)
        if middle is not None:
            gaps.append((middle, (line.points[0][1],), 0.0))
    for index in range(len(line.points) - 1):
        (low, lower), (high, upper) = line.points[index], line.points[index + 1]
        middle = middle_size(low, high, min_gib)
        if middle is not None:
            gaps.append((middle, (lower, upper), max(bends[index], bends[index + 1])))
    return gaps


def _min_size(line: Line, space: Space) -> float:
    return 0.0 if line.axis == "disk_mib_s" else space.least_gib


def _bound(
    point: Configuration,
    ends: Sequence[Evaluated],
    objectives: Objectives,
    certain_of: Certain | None,
) -> np.ndarray:
    """Return the best possible objectives of ``point``, from its neighbours and its price."""
    bound = objectives.matrix(ends).min(axis=0)
    if certain_of is not None:
        certain = certain_of(point, ends)
        for index, m in enumerate(objectives.metrics):
            if m.key in certain:
                bound[index] = -certain[m.key] if m.maximise else certain[m.key]
    return bound


def _zero_size(c: Configuration, axis: str) -> Configuration:
    zero: dict[str, Any] = {axis: 0.0}
    return replace(c, **zero)


def _set_size(line: Line, size: float) -> Configuration:
    change: dict[str, Any] = {line.axis: size}
    return replace(line.base, **change)


def _curvature(points: Sequence[np.ndarray]) -> list[float]:
    """Return the curvature of the line of objectives at each point; 0 at its ends."""
    bends = [0.0] * len(points)
    for i in range(1, len(points) - 1):
        bends[i] = float(np.abs(points[i - 1] - 2 * points[i] + points[i + 1]).max())
    return bends
