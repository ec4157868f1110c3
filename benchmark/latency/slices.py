"""Slices of a trace for stepped.py: when their requests are due, and whose turn it is."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from typing import TypeVar

from canopy_lab.trace.materialise import PlannedJob

ArmT = TypeVar("ArmT")


def due_times(part: Sequence[PlannedJob], rate_per_s: float, seed: int) -> list[float]:
    """Return due times in seconds from the slice's start: the trace's own gaps, as fast as ``rate_per_s`` requests a second.

    Requests with equal stamps are spread evenly up to the next stamp; at the last stamp, over the
    shortest step of the slice.
    """
    stamps_s = [planned.request.time_s for planned in part]
    steps_s = [after - before for before, after in itertools.pairwise(stamps_s) if after > before]
    if not steps_s:  # one stamp for all: a Poisson process instead
        rng = random.Random(seed)
        return list(itertools.accumulate(rng.expovariate(rate_per_s) for _ in part))
    spread_s: list[float] = []
    for time_s, group in itertools.groupby(stamps_s):
        group_size = len(list(group))
        step_s = next((t for t in stamps_s if t > time_s), time_s + min(steps_s)) - time_s
        spread_s += [time_s + step_s * i / group_size for i in range(group_size)]
    span_s = (stamps_s[-1] + min(steps_s)) - stamps_s[0]
    return [(t - stamps_s[0]) / span_s * len(part) / rate_per_s for t in spread_s]


def cut_evenly(planned: Sequence[PlannedJob], slices: int) -> list[Sequence[PlannedJob]]:
    """Cut ``planned`` into ``slices`` slices with about equal prompt tokens, none of them empty.

    The bootstrap draws slices with equal weight; a slice a hundred times as long as the others would
    dominate every draw that has it.
    """
    if not 0 < slices <= len(planned):
        raise ValueError(f"{len(planned)} requests cannot be cut into {slices} slices")
    token_sums = list(itertools.accumulate(p.prompt_tokens for p in planned))
    starts = [0]
    for number in range(1, slices):
        target_tokens = token_sums[-1] * number / slices
        allowed_starts = range(starts[-1] + 1, len(planned) - (slices - number) + 1)
        starts.append(min(allowed_starts, key=lambda i: abs(token_sums[i - 1] - target_tokens)))
    return [planned[a:b] for a, b in itertools.pairwise([*starts, len(planned)])]


def rate_of(parts: Sequence[Sequence[PlannedJob]], load: float, tokens_per_s: float) -> float:
    """Return the requests per second at which ``parts`` give ``load``, a share of a server's capacity.

    The share is of prompt tokens, since some slices have prompts three times as long as others.
    """
    prompt_tokens = [planned.prompt_tokens for part in parts for planned in part]
    return load * tokens_per_s * len(prompt_tokens) / sum(prompt_tokens)


def arm_order(arms: Sequence[ArmT], slice_number: int) -> list[ArmT]:
    """Return the order of the arms in slice ``slice_number``: each is first in turn, forwards and back."""
    shift = slice_number % len(arms)
    order = [*arms[shift:], *arms[:shift]]
    return order[:1] + order[:0:-1] if slice_number // len(arms) % 2 else order
