"""Waiting times of prompts in the queue of servers that compute one prompt at a time.

Prompts start in the order of their arrival, each on the server that is free first (Kiefer and
Wolfowitz, 1955; with one server Lindley's recursion, 1952). The model has no decode steps between prompts and
no waits for memory: ``canopy simulate system`` has both.
"""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

BUSY = 0.7
"""Largest share of time that a server spends on prefill, if the number of servers is not given."""

MAX_QUEUE_ARRIVALS = 400_000
"""Maximum arrivals of a queue."""
SLICES, GROUP = 20, 16
"""Slices of a longer log with every arrival; between them, an arrival represents a group."""
WARM = 0.25
"""Share of a slice, at its start, whose waits do not count."""
NEAR = 100
"""An arrival is drawn from this number of requests of the sample before and after it."""


def servers_for(prefill_busy: float) -> int:
    """Return the fewest servers that are at most ``BUSY``. ``prefill_busy``: work in servers."""
    return max(1, math.ceil(prefill_busy / BUSY))


@dataclass(frozen=True, slots=True)
class Arrivals:
    """Arrivals of the whole log, ascending, drawn from a sample."""

    times_s: NDArray[np.float64]
    of: NDArray[np.int64]
    """Index of the request of the sample that arrives."""
    stands_for: NDArray[np.int64]
    """Number of requests of the log that the arrival represents."""
    measured: NDArray[np.bool_]
    """Whether the wait counts."""


def log_arrivals(
    sample_s: NDArray[np.float64], log_s: NDArray[np.float64], *, most: int = MAX_QUEUE_ARRIVALS
) -> Arrivals:
    """Return the arrivals of a log, each as a request of its sample at about that time.

    The sample's own arrivals would make another queue: they vary more, and a busy hour would shrink
    with the time axis. Deterministic. Beyond ``most`` arrivals, only ``SLICES`` slices of time have
    every arrival; between them one arrival represents ``GROUP``.
    """
    count, sampled = len(log_s), len(sample_s)
    every = _in_slices(count, most / count)
    kept = every | (np.arange(count) % GROUP == 0)
    times, draw = log_s[kept], np.random.default_rng(0)
    near = np.searchsorted(sample_s, times) + draw.integers(-NEAR, NEAR + 1, len(times))
    near = np.clip(near, 0, sampled - 1)
    # A group that arrives at once leaves more work than the same requests one by one.
    measured = every if most >= count else every & ~_in_slices(count, WARM * most / count)
    return Arrivals(times, near, np.where(every[kept], 1, GROUP), measured[kept])


def every_arrival(times_s: NDArray[np.float64]) -> Arrivals:
    """Return the arrivals of a log that is its own sample."""
    count = len(times_s)
    return Arrivals(times_s, np.arange(count), np.ones(count, np.int64), np.ones(count, np.bool_))


def _in_slices(count: int, share: float) -> NDArray[np.bool_]:
    """Return which of ``count`` requests are in slices that together have ``share`` of them."""
    if share >= 1:
        return np.ones(count, np.bool_)
    within = np.arange(count) * SLICES / count % 1
    return within < share


def waits_s(
    arrivals_s: NDArray[np.float64],
    service_s: NDArray[np.float64],
    servers: int,
    stands_for: NDArray[np.int64] | None = None,
) -> NDArray[np.float64]:
    """Return the seconds from each arrival (ascending) until its prefill begins.

    The work of an arrival that represents several requests is spread over all servers.
    """
    free = [0.0] * servers
    waits = np.empty(len(arrivals_s))
    count = [1] * len(waits) if stands_for is None else stands_for.tolist()
    for index, (at, needs, many) in enumerate(zip(arrivals_s.tolist(), service_s.tolist(), count)):
        begin = max(at, free[0])
        if many == 1:
            heapq.heapreplace(free, begin + needs)
        else:
            free = [max(at, end) + needs * many / servers for end in free]
        waits[index] = begin - at
    return waits
