"""Arrival times of a log's requests in the simulation of its server.

Requests arrive at their logged times, except that a request also waits for an earlier answer: if
the log shows that an earlier request with its prefix was answered before, the request waits for
that answer in the simulation. A server simulated as too slow would otherwise receive requests
before it has answered, which no client sent, and would hit less than the real server.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence

from canopy_lab.sim.system.workload import Workload
from canopy_lab.trace.served_log import ServedRequest


class AsAnswered:
    """``Arrivals`` of a log's requests. ``served`` is keyed by the requests' ``line``."""

    def __init__(self, workload: Workload, served: Mapping[int, ServedRequest]) -> None:
        self._times = list(workload.times)
        self._following: dict[int, list[int]] = {}
        waits: set[int] = set()
        under_way: list[tuple[float, int]] = []
        answered: dict[int, int] = {}
        """Block -> last answered request whose prompt has it."""
        for index, record in enumerate(workload.trace):
            now = self._times[index]
            while under_way and under_way[0][0] <= now:
                _, earlier = heapq.heappop(under_way)
                answered.update(dict.fromkeys(workload.trace[earlier].blocks, earlier))
            found = None
            for block in record.blocks:
                if block not in answered:
                    break
                found = answered[block]
            if found is not None:
                self._following.setdefault(found, []).append(index)
                waits.add(index)
            answer = served.get(record.line)
            if answer is not None and answer.e2e_s is not None:
                heapq.heappush(under_way, (now + answer.e2e_s, index))
        self._first = [(t, i) for i, t in enumerate(self._times) if i not in waits]

    def begin(self) -> Sequence[tuple[float, int]]:
        return self._first

    def answered(self, request: int, end_s: float) -> Sequence[tuple[float, int]]:
        return [(max(self._times[i], end_s), i) for i in self._following.get(request, ())]
