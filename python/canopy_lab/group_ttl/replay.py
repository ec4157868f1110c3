"""Simulate a disk tier with TTLs and no capacity limit: hits and mean content.

A use sets a page's expiry to the largest TTL from the page to the end of the request's path, so that
no page outlives its prefix; later uses can only extend it. TTLs come from the table in force at the
request. Vectorised, without an event loop; exact to the microsecond.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from canopy_lab.group_ttl.paths import Paths, PathSegments, segments_of
from sglang_canopy.errors import CanopyError
from sglang_canopy.ttl.table import TTLTable

TableSchedule = Sequence[tuple[float, TTLTable]]
"""(start time in seconds, table), by time. The first table applies from the start."""


@dataclass(frozen=True, slots=True)
class TTLOutcome:
    """Hits and mean disk content of a schedule of TTLs on a trace."""

    tokens: int
    hits: int
    """Prompt tokens found on the disk."""
    mean_tokens: float
    """Mean tokens on the disk over the measured time."""

    @property
    def hit_ratio(self) -> float:
        return self.hits / self.tokens if self.tokens else 0.0


def fixed_ttls(
    segments: PathSegments, ttls_s: Iterable[float], since_s: float = -np.inf
) -> list[TTLOutcome]:
    """Return the outcome of each single TTL in ``ttls_s``, in one pass."""
    times_s = segments.times_s[segments.use_request]
    tokens_used = segments.tokens[segments.use_segment]
    gaps_s = segments.gaps_s
    start_s = max(since_s, segments.start_s)
    next_s = np.minimum(times_s + gaps_s, segments.end_s)
    measured_tokens = int(segments.tokens[segments.use_segment[times_s >= start_s]].sum())
    outcomes = []
    for ttl_s in ttls_s:
        is_hit = np.isfinite(gaps_s) & (gaps_s <= ttl_s) & (times_s + gaps_s >= start_s)
        end_s = np.minimum(next_s, times_s + ttl_s)
        kept_s = np.maximum(end_s - np.maximum(times_s, start_s), 0.0)
        outcomes.append(
            TTLOutcome(
                measured_tokens,
                int(tokens_used[is_hit].sum()),
                float((kept_s * tokens_used).sum() / max(segments.end_s - start_s, 1e-9)),
            )
        )
    return outcomes


def simulate_ttl(paths: Paths, schedule: TableSchedule, since_s: float = -np.inf) -> TTLOutcome:
    """Simulate ``schedule`` on ``paths``; requests before ``since_s`` only fill the disk.

    Raises ``CanopyError`` for a schedule that is empty or not in order of time.
    """
    starts = [start for start, _ in schedule]
    if not starts or sorted(starts) != starts:
        raise CanopyError(f"a schedule of TTL tables must be in order of time, got {starts}")
    roots = {group.root for _, table in schedule for group in table.groups}
    segments = segments_of(paths, roots)
    tables = np.maximum(np.searchsorted(starts, segments.times_s, side="right") - 1, 0)
    return _outcome(segments, _stay_s(segments, schedule, tables), since_s)


def _stay_s(segments: PathSegments, schedule: TableSchedule, tables: NDArray[np.int64]) -> NDArray:
    """Return one value per use: the largest TTL from each used page to the end of the request's path."""
    stay_s = np.zeros(len(segments.use_request))
    horizon_s = segments.end_s - segments.start_s + 1.0
    ttl_s = np.stack(
        [
            np.minimum(_ttl_matrix(segments, table), horizon_s)
            for _, table in schedule
        ]
    )  # fmt: skip
    largest_ttl_s = np.zeros(len(segments.times_s))
    category = segments.category
    for requests, uses in segments.levels:
        ttl = ttl_s[tables[requests], category[requests], segments.use_segment[uses]]
        largest_ttl_s[requests] = np.maximum(largest_ttl_s[requests], ttl)
        stay_s[uses] = largest_ttl_s[requests]
    return stay_s


def _ttl_matrix(segments: PathSegments, table: TTLTable) -> NDArray[np.float64]:
    """Return (categories, segments): the TTL of each segment for a request of each category."""
    group = segments.deepest_roots(g.root for g in table.groups)
    by_group = np.array([g.ttl_s for g in table.groups] + [0.0])
    rows = []
    for name in segments.categories:
        residual = table.ttl_s(-1, name)
        rows.append(np.where(group >= 0, by_group[group], residual))
    return np.stack(rows)


def _outcome(segments: PathSegments, stay_s: NDArray, since_s: float) -> TTLOutcome:
    times_s = segments.times_s[segments.use_request]
    segment = segments.use_segment
    use_tokens = segments.tokens[segment]
    start_s = max(since_s, segments.start_s)
    # A page expires at the latest time that its uses set: a running maximum within each segment.
    # Times are whole microseconds, so that the segment number fits into the higher digits.
    origin = segments.start_s
    span_us = int((3 * (segments.end_s - origin) + 4) * 1e6)
    expiry_us = np.round((times_s - origin + stay_s) * 1e6).astype(np.int64)
    expiry_us = np.maximum.accumulate(segment * span_us + expiry_us) - segment * span_us
    use_us = np.round((times_s - origin) * 1e6).astype(np.int64)
    end_us = round((segments.end_s - origin) * 1e6)
    next_us = np.full(len(use_us), end_us)
    same_segment = segment[1:] == segment[:-1]
    next_us[:-1][same_segment] = use_us[1:][same_segment]
    is_hit = np.zeros(len(use_us), dtype=bool)
    is_hit[1:] = same_segment & (use_us[1:] <= expiry_us[:-1])
    is_measured = times_s >= start_s
    start_us = round((start_s - origin) * 1e6)
    kept_us = np.maximum(np.minimum(next_us, expiry_us) - np.maximum(use_us, start_us), 0)
    return TTLOutcome(
        int(use_tokens[is_measured].sum()),
        int(use_tokens[is_hit & is_measured].sum()),
        float((kept_us * use_tokens.astype(np.float64)).sum() / max(end_us - start_us, 1)),
    )
