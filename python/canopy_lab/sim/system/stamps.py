"""Traces that note their times in steps: when their requests may have come."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import pairwise
from statistics import median

STAMPED_SHARE = 0.5
"""Times are stamps of an interval if more than this share of the requests has one in common
with another request."""


def spread_stamps(times: Sequence[float], seed: int = 0) -> list[float]:
    """``times`` in which requests of one stamp come at random moments of its interval.

    A trace that notes its times in steps (Mooncake: 3 s) says of a request only in which step it
    came; taken as they are, all of a step come at once, and the queues are those of bursts that
    never were. Where more than half of the requests share their time with another, those of one
    stamp are drawn uniformly from the time to the next stamp, at most the usual (median) gap
    between stamps, and keep their order. Other times stay as they are. Deterministic in ``seed``.
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
