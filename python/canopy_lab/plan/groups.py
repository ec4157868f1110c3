"""Learn group TTLs for a disk of a given size from the trace (Kareto, Algorithm 2)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from canopy_lab.group_ttl.learn import Learning, learn
from canopy_lab.group_ttl.paths import Paths, paths_of
from canopy_lab.trace.record import TraceRequest
from sglang_canopy.ttl.table import TRACE_HASH, TTLTable

SHORTEST_S = 60.0
"""Minimum lifetime of a plan, seconds."""


@dataclass(frozen=True, slots=True)
class ObservedTraffic:
    """The requests of a trace, as input for a table of any disk size."""

    log: Paths
    learning: Learning
    hash: str

    def table(self, budget_bytes: float, bytes_per_token: float) -> TTLTable:
        """Return the table with the most expected hits within a mean disk content in bytes."""
        return learn(self.log, budget_bytes / bytes_per_token, self.learning, self.hash).table


def observe(trace: Iterable[TraceRequest], hash: str = TRACE_HASH) -> ObservedTraffic:
    log = paths_of(trace, lambda request: request.category)
    # A plan is used for about the duration of its trace.
    learning = Learning(refresh_s=max(log.end_s - log.start_s, SHORTEST_S))
    return ObservedTraffic(log, learning, hash)
