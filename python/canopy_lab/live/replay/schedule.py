"""Send times of a replay's requests.

A request is due at the trace's time (scaled), but not before its conversation's previous request
was answered, because a user needs the answer first. In a closed loop it is due after that answer
and the think time, independent of the trace's times.
"""

from __future__ import annotations

import asyncio
import contextlib
import heapq
from collections import defaultdict
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from canopy_lab.trace.materialise import PlannedJob
from canopy_lab.trace.sessions import TurnLinks

_TICK_S = 1e-6
"""A timer may fire this early; waiting for the rest would spin."""


@dataclass(slots=True)
class ReplayRequest:
    """One request of a replay and its reply. Times on the event loop's clock."""

    planned: PlannedJob
    labels: dict[str, Any]
    """Labels for ``custom_params``, without forced tokens."""
    due_s: float = 0.0
    """Due time; set once the request may be sent."""
    reply: Any = field(default=None, repr=False)


class Schedule:
    """Yields jobs as they become due. Use within one event loop.

    ``offsets_s`` gives each job's time from the start of the replay, in the order of the jobs,
    which is the trace's. Among due jobs, the first in the trace is sent first. ``max_outstanding`` bounds the
    outstanding jobs. A queue at the client would instead send jobs in the order in which they
    became due: a trace replayed faster than the server serves would lose its order.

    ``closed_loop`` makes it one: each job's predecessor and think time.
    """

    def __init__(
        self,
        jobs: Sequence[ReplayRequest],
        offsets_s: Sequence[float],
        max_outstanding: int | None = None,
        closed_loop: TurnLinks | None = None,
    ) -> None:
        self._jobs = jobs
        self._offsets_s = offsets_s
        self._free_slots = max_outstanding if max_outstanding else len(jobs)
        self._links = closed_loop
        self._index_by_ordinal = {job.planned.ordinal: i for i, job in enumerate(jobs)}
        self._followers: dict[int, list[int]] = defaultdict(list)
        self._future_jobs: list[tuple[float, int]] = []
        self._due_jobs: list[int] = []
        self._change_event = asyncio.Event()
        self._start_s = 0.0

    async def arrivals(self) -> AsyncIterator[ReplayRequest]:
        """Yield every job when it is due and its predecessor was answered."""
        self._start_s = asyncio.get_running_loop().time()
        for i, job in enumerate(self._jobs):
            previous: int | None = self._index_by_ordinal.get(job.planned.previous)  # type: ignore[arg-type]
            if self._links is not None:
                previous = self._links.previous[i] if self._links.previous[i] >= 0 else None
            if previous is None:
                heapq.heappush(self._future_jobs, (self._start_s + self._offsets_s[i], i))
            else:
                self._followers[previous].append(i)
        for _ in range(len(self._jobs)):
            while not self._move_due_jobs() or not self._free_slots:
                await self._wait_for_change()
            self._free_slots -= 1
            yield self._jobs[heapq.heappop(self._due_jobs)]

    def record_answer(self, job: ReplayRequest) -> None:
        """Record that ``job`` was answered or failed, and release its successors."""
        now_s = asyncio.get_running_loop().time()
        for i in self._followers.pop(self._index_by_ordinal[job.planned.ordinal], ()):
            if self._links is not None:
                due_s = now_s + self._links.think_s[i]
            else:
                due_s = max(now_s, self._start_s + self._offsets_s[i])
            heapq.heappush(self._future_jobs, (due_s, i))
        self._free_slots += 1
        self._change_event.set()

    def _move_due_jobs(self) -> bool:
        """Move jobs that have become due to the due jobs; return whether there are any."""
        now_s = asyncio.get_running_loop().time()
        while self._future_jobs and self._future_jobs[0][0] - now_s <= _TICK_S:
            due_s, i = heapq.heappop(self._future_jobs)
            self._jobs[i].due_s = due_s
            heapq.heappush(self._due_jobs, i)
        return bool(self._due_jobs)

    async def _wait_for_change(self) -> None:
        """Wait until the next job is due or an answer arrives."""
        wait_s = None
        if self._future_jobs and not self._due_jobs:
            wait_s = self._future_jobs[0][0] - asyncio.get_running_loop().time()
        self._change_event.clear()
        # asyncio's TimeoutError is a separate class before Python 3.11.
        with contextlib.suppress(TimeoutError, asyncio.TimeoutError):
            await asyncio.wait_for(self._change_event.wait(), wait_s)
