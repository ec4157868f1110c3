"""How long prompts wait for each other: a queue before servers that compute one prompt at a time.

First come, first served; a request goes to the server that is free first (Kiefer and Wolfowitz,
1955; with one server Lindley's recursion, 1952). Decode steps between prompts, and memory that a
prompt waits for, are left out: ``canopy simulate system`` has both.
"""

from __future__ import annotations

import heapq
import math

import numpy as np
from numpy.typing import NDArray

BUSY = 0.7
"""Share of its time that a server computes prompts, where nobody says how many servers there are."""


def servers_for(prefill_busy: float) -> int:
    """Fewest servers of which none is busier than ``BUSY``, given the work in servers."""
    return max(1, math.ceil(prefill_busy / BUSY))


def waits_s(
    arrivals_s: NDArray[np.float64], service_s: NDArray[np.float64], servers: int
) -> NDArray[np.float64]:
    """Seconds from each arrival (ascending) until its prompt is begun."""
    free = [0.0] * servers
    waits = np.empty(len(arrivals_s))
    for index, (at, needs) in enumerate(zip(arrivals_s.tolist(), service_s.tolist())):
        begin = max(at, free[0])
        heapq.heapreplace(free, begin + needs)
        waits[index] = begin - at
    return waits
