"""Lifespan of blocks, from first use to last (Section 3.5, Figures 19 and 20)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from canopy_lab.characterize.observe import FINE_EDGES, Observation, edges_within

MAX_CATEGORIES = 10


@dataclass(frozen=True, slots=True)
class CategoryLife:
    """Blocks that this category used last."""

    name: str
    blocks: int
    mean_s: float
    p90_s: float


@dataclass(frozen=True, slots=True)
class Lifespan:
    """Lifespans in seconds; 0 for a block used once."""

    used_once: float
    """Share of the blocks, 0 to 1."""
    p50_s: float
    p90_s: float
    p99_s: float
    longest_s: float
    age_s: tuple[float, ...]
    dead: tuple[float, ...]
    """Share of the blocks whose life is at most ``age_s``."""
    categories: tuple[CategoryLife, ...]


def lifespan(seen: Observation) -> Lifespan:
    """Compute lifespans. Blocks still in use at the end of the trace count as ended."""
    life = seen.last_s - seen.first_s
    ordered = np.sort(life)
    edges = FINE_EDGES[: edges_within(seen.span_s)]
    edges = np.append(edges, max(edges[-1] * 1.001, float(ordered[-1])))
    dead = np.searchsorted(ordered, edges, "right") / len(ordered)
    category = seen.category[seen.last_request]
    names, counts = np.unique(category, return_counts=True)
    rows = []
    for one in names[np.argsort(-counts, kind="stable")][:MAX_CATEGORIES]:
        mine = life[category == one]
        rows.append(
            CategoryLife(
                seen.category_name(int(one)),
                len(mine),
                float(mine.mean()),
                float(np.quantile(mine, 0.9)),
            )
        )
    p50, p90, p99 = (float(v) for v in np.quantile(ordered, (0.5, 0.9, 0.99)))
    return Lifespan(
        used_once=float((seen.uses == 1).mean()),
        p50_s=p50,
        p90_s=p90,
        p99_s=p99,
        longest_s=float(ordered[-1]),
        age_s=tuple(edges.tolist()),
        dead=tuple(dead.tolist()),
        categories=tuple(rows),
    )
