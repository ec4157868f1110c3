"""Learn group TTLs for a disk of a given size from the trace (Kareto, Algorithm 2)."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from canopy_lab.group_ttl.learn import Learning, learn
from canopy_lab.group_ttl.path_log import PathLog, PathSnapshot
from canopy_lab.trace.record import TraceRequest
from sglang_canopy.ttl.table import TRACE_HASH, TTLTable

SHORTEST_S = 60.0
"""Minimum lifetime of a plan, seconds."""
MAX_BLOCKS = 1 << 24
"""Maximum distinct blocks, about 2 GB. The oldest requests are dropped first."""


@dataclass(frozen=True, slots=True)
class ObservedTraffic:
    """The requests of a trace, as input for a table of any disk size."""

    log: PathSnapshot
    learning: Learning
    hash: str

    def table(self, budget_bytes: float, bytes_per_token: float) -> TTLTable:
        """Return the table with the most expected hits within a mean disk content in bytes."""
        return learn(self.log, budget_bytes / bytes_per_token, self.learning, self.hash).table


def observe(trace: Iterable[TraceRequest], hash: str = TRACE_HASH) -> ObservedTraffic:
    """Record a whole trace. ``hash``: origin of the block ids, the trace or a server."""
    log: PathLog | None = None
    begin = end = 0.0
    for request in trace:
        if log is None:
            log = PathLog(
                block_tokens=request.block_tokens,
                window_s=math.inf,
                max_requests=MAX_BLOCKS,
                max_blocks=MAX_BLOCKS,
            )
            begin = request.time_s
        end = request.time_s
        log.observe(request.blocks, request.time_s, request.input_tokens, request.category)
    assert log is not None, "an empty trace is refused before"
    # A plan is used for about the duration of its trace.
    learning = Learning(refresh_s=max(end - begin, SHORTEST_S))
    return ObservedTraffic(log.snapshot(), learning, hash)
