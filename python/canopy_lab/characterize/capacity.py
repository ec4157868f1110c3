"""Capacity needed for the ideal hit ratio (Section 3.5, Figure 22)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from canopy_lab.characterize.observe import Observation
from canopy_lab.sim.stack import LRUCurve

CURVE_POINTS = 240
IDEAL_SHARES = (0.5, 0.8, 0.9, 0.95, 0.99)


@dataclass(frozen=True, slots=True)
class Capacity:
    """Capacities in blocks of the trace."""

    distinct_blocks: int
    block_bytes: int
    """Bytes of KV of one block."""
    time_s: tuple[float, ...]
    live_blocks: tuple[int, ...]
    """Blocks with a later use: the minimum content of an ideal cache."""
    live_peak: int
    lru_blocks: tuple[int, ...]
    lru_hit_ratio: tuple[float, ...]
    """Block hit ratio of LRU with ``lru_blocks`` blocks."""
    ideal_hit_ratio: float
    lru_for_share: tuple[tuple[float, int], ...]
    """(share of the ideal hits, blocks that LRU needs for them)."""


def measure_capacity(observation: Observation, lru: LRUCurve, block_bytes: int) -> Capacity:
    start_s, end_s = float(observation.time_s[0]), float(observation.time_s[-1])
    times_s = np.linspace(start_s, end_s, CURVE_POINTS)
    is_reused = observation.uses > 1
    first_uses_s = np.sort(observation.first_s[is_reused])
    last_uses_s = np.sort(observation.last_s[is_reused])
    live_blocks = np.searchsorted(first_uses_s, times_s, "right")
    live_blocks -= np.searchsorted(last_uses_s, times_s, "right")
    capacities, hit_ratios = lru_points(lru)
    return Capacity(
        distinct_blocks=observation.distinct_blocks,
        block_bytes=block_bytes,
        time_s=tuple(times_s.tolist()),
        live_blocks=tuple(live_blocks.tolist()),
        live_peak=_max_open(first_uses_s, last_uses_s),
        lru_blocks=tuple(capacities.tolist()),
        lru_hit_ratio=tuple(hit_ratios.tolist()),
        ideal_hit_ratio=float(observation.hits.sum() / max(observation.blocks.sum(), 1)),
        lru_for_share=tuple((share, lru_blocks_for(lru, share)) for share in IDEAL_SHARES),
    )


def lru_points(lru: LRUCurve) -> tuple[np.ndarray, np.ndarray]:
    """Return (capacities in blocks, LRU's block hit ratios), spaced evenly in the logarithm."""
    max_blocks = max(lru.distinct_blocks, 2)
    capacities = np.unique(np.geomspace(1, max_blocks, CURVE_POINTS).astype(np.int64))
    hits = lru.block_hits_at
    return capacities, hits[np.minimum(capacities, len(hits) - 1)] / max(lru.blocks, 1)


def lru_blocks_for(lru: LRUCurve, share: float) -> int:
    """Return the least LRU capacity with ``share`` of the hits of an unbounded cache."""
    hits = lru.block_hits_at
    return int(np.searchsorted(hits, share * hits[-1]))


def _max_open(starts: np.ndarray, ends: np.ndarray) -> int:
    """Return the maximum number of intervals [start, end) that are open at one time."""
    if not len(starts):
        return 0
    open_now = np.arange(1, len(starts) + 1) - np.searchsorted(ends, starts, "right")
    return int(open_now.max())
