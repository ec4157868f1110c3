"""When requests come: at the trace's times, or after the answers that they continue."""

from __future__ import annotations

import random
from array import array
from collections.abc import Sequence
from typing import Protocol

from sglang_canopy.errors import CanopyError
from sglang_canopy.sim.system.workload import Workload


class Arrivals(Protocol):
    """Says when each request of a workload is due. Times in seconds."""

    def begin(self) -> Sequence[tuple[float, int]]:
        """``(time, request)`` of those that wait for nobody, in order of time."""

    def answered(self, request: int, end_s: float) -> Sequence[tuple[float, int]]:
        """``request`` is answered: those that come after it, none before ``end_s``."""


class OpenLoop:
    """Each request at its time, whatever the server does. ``stretch`` multiplies the times."""

    def __init__(self, workload: Workload, stretch: float = 1.0) -> None:
        _positive("stretch", stretch)
        self._times = [time * stretch for time in workload.times]

    def begin(self) -> Sequence[tuple[float, int]]:
        return [(time, index) for index, time in enumerate(self._times)]

    def answered(self, request: int, end_s: float) -> Sequence[tuple[float, int]]:
        return ()


class TurnsWait(OpenLoop):
    """Each at its time, but a turn no earlier than the answer before it."""

    def __init__(self, workload: Workload, stretch: float = 1.0) -> None:
        super().__init__(workload, stretch)
        self._next = workload.next_turn

    def begin(self) -> Sequence[tuple[float, int]]:
        later = set(self._next)
        return [pair for pair in super().begin() if pair[1] not in later]

    def answered(self, request: int, end_s: float) -> Sequence[tuple[float, int]]:
        following = self._next[request]
        return [] if following < 0 else [(max(self._times[following], end_s), following)]


class ClosedLoop:
    """Agents: a turn is sent after the answer to the one before it and the time to think.

    Sessions begin at ``sessions_per_hour``, at random (exponential gaps, from ``seed``) and in the
    order of the trace; without a rate, at the trace's times. The time to think is
    ``TraceRequest.think_s`` where the trace has it, else the gap between the two arrivals in the
    trace, which holds the answer's time too; at most ``think_cap_s``. A sub-agent, whose
    conversation is named after its parent's (``parent/child``), begins after the answer to the
    parent's last turn before it in the trace.
    """

    def __init__(
        self,
        workload: Workload,
        *,
        sessions_per_hour: float | None = None,
        think_cap_s: float | None = 120.0,
        seed: int = 0,
    ) -> None:
        if sessions_per_hour is not None:
            _positive("sessions_per_hour", sessions_per_hour)
        if think_cap_s is not None and not think_cap_s >= 0:
            raise CanopyError(f"think_cap_s must be 0 or more, got {think_cap_s!r}")
        self.session, before = sessions(workload)
        """For each request, the first request of its session."""
        self._following: dict[int, list[tuple[float, int]]] = {}
        starts = []
        for index, earlier in enumerate(before):
            if earlier < 0:
                starts.append(index)
                continue
            think = workload.trace[index].think_s
            if think is None or workload.next_turn[earlier] != index:
                think = workload.times[index] - workload.times[earlier]
            if think_cap_s is not None:
                think = min(think, think_cap_s)
            self._following.setdefault(earlier, []).append((think, index))
        if sessions_per_hour is None:
            self._starts = [(workload.times[index], index) for index in starts]
        else:
            draw, now, self._starts = random.Random(seed), 0.0, []
            for index in starts:
                now += draw.expovariate(sessions_per_hour / 3600)
                self._starts.append((now, index))

    def begin(self) -> Sequence[tuple[float, int]]:
        return self._starts

    def answered(self, request: int, end_s: float) -> Sequence[tuple[float, int]]:
        return [(end_s + think, index) for think, index in self._following.get(request, ())]


def sessions(workload: Workload) -> tuple[array[int], array[int]]:
    """For each request, the first one of its session, and the one that it comes after (or -1)."""
    count = len(workload)
    before = array("q", [-1]) * count
    for index, following in enumerate(workload.next_turn):
        if following >= 0:
            before[following] = index
    first = array("q", range(count))
    last: dict[str, int] = {}
    for index in range(count):
        name = workload.trace[index].conversation
        if name is not None:
            if before[index] < 0 and "/" in name:
                before[index] = last.get(name.rsplit("/", 1)[0], -1)
            last[name] = index
        if before[index] >= 0:
            first[index] = first[before[index]]
    return first, before


def _positive(name: str, value: float) -> None:
    if not 0 < value < float("inf"):
        raise CanopyError(f"{name} must be a number above 0, got {value!r}")
