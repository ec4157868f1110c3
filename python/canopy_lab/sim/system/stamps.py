"""Spread the arrivals of traces whose times are rounded to coarse steps."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import pairwise
from statistics import median

STAMPED_SHARE = 0.5
"""Times count as rounded if more than this share of the requests has a non-unique time."""


def spread_stamps(times: Sequence[float], seed: int = 0) -> list[float]:
    """Return ``times`` with requests of equal time spread over the rounding interval.

    Rounded times (Mooncake: 3 s) would otherwise cause bursts that did not exist. If more than half
    of the requests share their time with another request, equal times are redrawn uniformly up to
    the next time, at most the median gap, in the same order. Other traces are unchanged.
    Deterministic in ``seed``.
    """
    groups: list[list[int]] = []
    for index, time in enumerate(times):
        if groups and times[groups[-1][0]] == time:
            groups[-1].append(index)
        else:
            groups.append([index])
    shared = sum(len(group) for group in groups if len(group) > 1)
    if shared <= STAMPED_SHARE * len(times) or len(groups) < 2:
        return list(times)
    stamps = [times[group[0]] for group in groups]
    gaps = [later - earlier for earlier, later in pairwise(stamps)]
    usual, draw, made = median(gaps), random.Random(seed), list(times)
    for group, gap in zip(groups, [*gaps, usual], strict=True):
        moments = sorted(draw.random() for _ in group)
        for index, moment in zip(group, moments, strict=True):
            made[index] = times[index] + moment * min(gap, usual)
    return made
