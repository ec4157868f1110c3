"""Algorithm 1 of the paper to the letter: adaptive exploration of two continuous variables.

Section 4.2. The second variable is a TTL in the listing and the disk's size in the evaluation
(section 5.3.1); here it is either. The thresholds have no values in the text; ours are
shares of the range of what has been evaluated. The listing has no least distance between two
points, without which a cliff is halved for ever: ``MIN_STEPS`` is ours.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any, NamedTuple

Point = tuple[float, float]
"""DRAM in GiB, and the disk's GiB or the TTL on it in seconds."""
ExplorationRow = dict[str, Any]


class GridAxis(NamedTuple):
    """The values of one variable in the coarse grid."""

    low: float
    high: float
    step: float

    def values(self) -> list[float]:
        count = round((self.high - self.low) / self.step) + 1
        return [self.low + i * self.step for i in range(count)]


THROUGHPUT = "throughput_tokens_per_s"
EXPAND_SHARE = 0.02
REFINE_SHARE = 0.05
COST_SHARE = 0.005
MIN_STEPS: Point = (128.0, 150.0)


def adaptive_pareto_exploration(
    evaluate: Callable[[Point], ExplorationRow],
    dram: GridAxis,
    second: GridAxis,
    max_dram_gib: float,
) -> dict[Point, ExplorationRow]:
    """``dram`` and ``second``: axes of the coarse grid. Returns every point evaluated.

    Lines 2 to 8 evaluate the grid; 10 to 13 expand DRAM while its last step lowered latency where
    the second is least; 14 to 18 add the midpoint of two neighbours that differ in latency or
    throughput and in cost.
    """
    rows: dict[Point, ExplorationRow] = {}
    second_values = second.values()
    points = [(d, t) for d in dram.values() for t in second_values]
    top_dram_gib = dram.high
    while points:
        for point in points:
            if point not in rows:
                rows[point] = evaluate(point)
        points = []
        latency_range, throughput_range, price_range = (
            _spread(rows, key) for key in ("mean_ttft_s", THROUGHPUT, "cost")
        )
        lower = (top_dram_gib - dram.step, second_values[0])
        upper = (top_dram_gib, second_values[0])
        can_expand = top_dram_gib + dram.step <= max_dram_gib and lower in rows
        if (
            can_expand
            and rows[lower]["mean_ttft_s"] - rows[upper]["mean_ttft_s"]
            > EXPAND_SHARE * latency_range
        ):
            top_dram_gib += dram.step
            points += [(top_dram_gib, t) for t in second_values]
        for point, neighbour in _neighbours(rows):
            row, neighbour_row = rows[point], rows[neighbour]
            differences = (
                abs(row["mean_ttft_s"] - neighbour_row["mean_ttft_s"]) / latency_range,
                abs(row[THROUGHPUT] - neighbour_row[THROUGHPUT]) / throughput_range,
            )
            cost_difference = abs(row["cost"] - neighbour_row["cost"]) / price_range
            if max(differences) <= REFINE_SHARE or cost_difference <= COST_SHARE:
                continue
            midpoint = ((point[0] + neighbour[0]) / 2, (point[1] + neighbour[1]) / 2)
            if all(x == y or abs(x - y) / 2 >= s for x, y, s in zip(point, neighbour, MIN_STEPS)):
                points.append(midpoint)
        points = [p for p in dict.fromkeys(points) if p not in rows]
    return rows


def _spread(rows: dict[Point, ExplorationRow], key: str) -> float:
    values = [row[key] for row in rows.values()]
    return max(max(values) - min(values), 1e-12)


def _neighbours(rows: dict[Point, ExplorationRow]) -> list[tuple[Point, Point]]:
    """Evaluated points next to each other on a line of equal DRAM or equal disk."""
    pairs = []
    for axis in (0, 1):
        points_by_line: dict[float, list[Point]] = {}
        for point in rows:
            points_by_line.setdefault(point[1 - axis], []).append(point)
        for line in points_by_line.values():
            line.sort()
            pairs += pairwise(line)
    return pairs
