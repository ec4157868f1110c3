"""Slices of a trace for stepped.py: when their requests are due, and whose turn it is."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from typing import TypeVar

from canopy_lab.trace.materialise import PlannedJob

ArmT = TypeVar("ArmT")


def due_times(part: Sequence[PlannedJob], rate: float, seed: int) -> list[float]:
    """Seconds from the slice's start: the trace's own gaps, as fast as ``rate`` requests a second.

    Requests with equal stamps are spread evenly up to the next stamp; at the last stamp, over the
    shortest step of the slice.
    """
    stamps = [planned.request.time_s for planned in part]
    steps_s = [later - t for t, later in itertools.pairwise(stamps) if later > t]
    if not steps_s:  # one stamp for all: a Poisson process instead
        rng = random.Random(seed)
        return list(itertools.accumulate(rng.expovariate(rate) for _ in part))
    spread_s: list[float] = []
    for time_s, group in itertools.groupby(stamps):
        group_size = len(list(group))
        step_s = next((t for t in stamps if t > time_s), time_s + min(steps_s)) - time_s
        spread_s += [time_s + step_s * i / group_size for i in range(group_size)]
    span_s = (stamps[-1] + min(steps_s)) - stamps[0]
    return [(t - stamps[0]) / span_s * len(part) / rate for t in spread_s]


def cut_evenly(planned: Sequence[PlannedJob], slices: int) -> list[Sequence[PlannedJob]]:
    """Cut ``planned`` into ``slices`` slices with about equal prompt tokens, none of them empty.

    The bootstrap draws slices with equal weight; a slice a hundred times as long as the others would
    dominate every draw that has it.
    """
    if not 0 < slices <= len(planned):
        raise ValueError(f"{len(planned)} requests cannot be cut into {slices} slices")
    ends = list(itertools.accumulate(p.prompt_tokens for p in planned))
    cuts = [0]
    for number in range(1, slices):
        target = ends[-1] * number / slices
        first_cut, last_cut = cuts[-1] + 1, len(planned) - (slices - number)
        cuts.append(min(range(first_cut, last_cut + 1), key=lambda i: abs(ends[i - 1] - target)))
    return [planned[a:b] for a, b in itertools.pairwise([*cuts, len(planned)])]


def rate_of(parts: Sequence[Sequence[PlannedJob]], load: float, tokens_a_second: float) -> float:
    """Return the requests per second at which ``parts`` give ``load``, a share of a server's capacity.

    The share is of prompt tokens, since some slices have prompts three times as long as others.
    """
    prompts = [planned.prompt_tokens for part in parts for planned in part]
    return load * tokens_a_second * len(prompts) / sum(prompts)


def arm_order(arms: Sequence[ArmT], number: int) -> list[ArmT]:
    """Return the order of the arms in slice ``number``: each is first in turn, forwards and back."""
    first = number % len(arms)
    order = [*arms[first:], *arms[:first]]
    return order[:1] + order[:0:-1] if number // len(arms) % 2 else order
