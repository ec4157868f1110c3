"""How much of each request LRU tiers of any size would find: hits apart from time.

A request's blocks go into its instance's stack when it arrives, prompt and output, deepest first.
Its prompt's stack distances never fall along its path (``sim/stack.py``), so that the blocks found
by a tier are those before the first distance that is too large: one pass serves every size. What
time does to hits (a turn that comes before the one before it is done, a pool full of running
requests) is left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from canopy_lab.sim.stack import COLD, StackDistances
from canopy_lab.sim.system.workload import Workload

_CHUNK = 1 << 19
"""Blocks of one pass over the stack."""
_MOST = 1 << 21
"""Of a trace with more blocks than this only every k-th of a path is looked at. No request and no
path is left out, and only the first k - 1 blocks of a path are never found on their own."""


class Paths(NamedTuple):
    """The blocks of every request, one after the other."""

    ids: NDArray[np.int64]
    lengths: NDArray[np.int64]
    """Of each request: prompt and output."""
    prompts: NDArray[np.int64]
    """Of these, those of the prompt."""
    every: int
    """How many blocks of the trace each one stands for."""


def paths_of(served: Workload, most: int = _MOST) -> Paths:
    """What the requests of ``served`` leave in a cache."""
    size, total = served.block_tokens, 0
    for record in served.trace:
        total += -(-(record.input_tokens + record.output_tokens) // size)
    every = max(1, -(-total // most))
    parts, lengths, prompts = [], [], []
    for index in range(len(served)):
        request, path, _, _, end = served.request(index)
        kept = path[: -(-end // size)][every - 1 :: every]
        parts.append(kept)
        lengths.append(len(kept))
        prompts.append(min(len(request.path), len(path)) // every)
    ids = np.fromiter(chain.from_iterable(parts), np.int64, sum(lengths))
    return Paths(ids, np.array(lengths), np.minimum(prompts, lengths), every)


def found_blocks(
    paths: Paths,
    capacities: Sequence[float] | NDArray[np.float64],
    among: NDArray[np.int64] | None = None,
) -> NDArray[np.int32]:
    """Leading blocks of each prompt that an LRU tier of so many blocks holds, shape (requests,
    capacities). ``among``: the ordinals of the requests that the tier serves; others find nothing.
    """
    count = len(paths.lengths)
    found = np.zeros((count, len(capacities)), np.int32)
    room = np.asarray(capacities, float) / paths.every
    begins = np.cumsum(paths.lengths) - paths.lengths
    chosen = np.arange(count) if among is None else among
    stack = StackDistances()
    at = 0
    while at < len(chosen):
        sizes = np.cumsum(paths.lengths[chosen[at:]])
        stop = at + max(1, int(np.searchsorted(sizes, _CHUNK)))
        part = chosen[at:stop]
        lengths = paths.lengths[part]
        ends = np.cumsum(lengths)
        within = np.arange(int(ends[-1])) - np.repeat(ends - lengths, lengths)
        where = np.repeat(begins[part], lengths) + within
        distances = stack.distances(paths.ids[where], lengths)
        for request, end, length, prompt in zip(part, ends, lengths, paths.prompts[part]):
            mine = distances[end - length : end - length + prompt]
            if prompt and mine[0] < COLD:
                found[request] = np.searchsorted(mine, room)
        at = stop
    return found * np.int32(paths.every)
