"""Algorithm 1 of the paper to the letter: adaptive exploration of two continuous variables.

Section 4.2. The second variable is a TTL in the listing and the disk's size in the evaluation
(section 5.3.1); here it is either. The thresholds have no values in the text; ours are
shares of the range of what has been evaluated. The listing has no least distance between two
points, without which a cliff is halved for ever: ``MIN_STEP`` is ours.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

Point = tuple[float, float]
"""DRAM in GiB, and the disk's GiB or the TTL on it in seconds."""
ExplorationRow = dict[str, Any]

THROUGHPUT = "throughput_tokens_per_s"
EXPAND = 0.02
REFINE = 0.05
COST = 0.005
MIN_STEP: Point = (128.0, 150.0)


def adaptive_pareto_exploration(
    evaluate: Callable[[Point], ExplorationRow],
    dram: tuple[float, float, float],
    second: tuple[float, float, float],
    max_dram: float,
) -> dict[Point, ExplorationRow]:
    """``dram`` and ``second``: from, to and step of the coarse grid. Returns every point evaluated.

    Lines 2 to 8 evaluate the grid; 10 to 13 expand DRAM while its last step lowered latency where
    the second is least; 14 to 18 add the midpoint of two neighbours that differ in latency or
    throughput and in cost.
    """
    rows: dict[Point, ExplorationRow] = {}
    columns = _steps(*second)
    points = [(d, t) for d in _steps(*dram) for t in columns]
    top = dram[1]
    while points:
        for point in points:
            if point not in rows:
                rows[point] = evaluate(point)
        points = []
        latency_range, throughput_range, price_range = (
            _range(rows, key) for key in ("mean_ttft_s", THROUGHPUT, "cost")
        )
        below = (top - dram[2], columns[0])
        last = (top, columns[0])
        can_expand = top + dram[2] <= max_dram and below in rows
        if (
            can_expand
            and rows[below]["mean_ttft_s"] - rows[last]["mean_ttft_s"] > EXPAND * latency_range
        ):
            top += dram[2]
            points += [(top, t) for t in columns]
        for point, neighbour in _neighbours(rows):
            a, b = rows[point], rows[neighbour]
            differences = (
                abs(a["mean_ttft_s"] - b["mean_ttft_s"]) / latency_range,
                abs(a[THROUGHPUT] - b[THROUGHPUT]) / throughput_range,
            )
            if max(differences) <= REFINE or abs(a["cost"] - b["cost"]) / price_range <= COST:
                continue
            middle = ((point[0] + neighbour[0]) / 2, (point[1] + neighbour[1]) / 2)
            if all(x == y or abs(x - y) / 2 >= s for x, y, s in zip(point, neighbour, MIN_STEP)):
                points.append(middle)
        points = [p for p in dict.fromkeys(points) if p not in rows]
    return rows


def _steps(low: float, high: float, step: float) -> list[float]:
    return [low + i * step for i in range(round((high - low) / step) + 1)]


def _range(rows: dict[Point, ExplorationRow], key: str) -> float:
    values = [row[key] for row in rows.values()]
    return max(max(values) - min(values), 1e-12)


def _neighbours(rows: dict[Point, ExplorationRow]) -> list[tuple[Point, Point]]:
    """Evaluated points next to each other on a line of equal DRAM or equal disk."""
    pairs = []
    for axis in (0, 1):
        lines: dict[float, list[Point]] = {}
        for point in rows:
            lines.setdefault(point[1 - axis], []).append(point)
        for line in lines.values():
            line.sort()
            pairs += pairwise(line)
    return pairs
