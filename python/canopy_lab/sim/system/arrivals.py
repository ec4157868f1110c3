"""Arrival times: from the trace, or after the answers that requests continue."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Protocol

from canopy_lab.sim.system.workload import Workload
from canopy_lab.trace.sessions import turn_links
from sglang_canopy.errors import CanopyError


class Arrivals(Protocol):
    """Arrival time of each request of a workload, in seconds."""

    def first_requests(self) -> Sequence[tuple[float, int]]:
        """Return sorted (time, request) pairs of the requests that depend on no other."""

    def following_requests(self, request: int, end_s: float) -> Sequence[tuple[float, int]]:
        """Return (time, request) pairs of requests that follow ``request``, answered at ``end_s``."""


class OpenLoop:
    """Each request at its time in the trace, multiplied by ``stretch``."""

    def __init__(self, workload: Workload, stretch: float = 1.0) -> None:
        _check_positive("stretch", stretch)
        self._times_s = [time * stretch for time in workload.times_s]

    def first_requests(self) -> Sequence[tuple[float, int]]:
        return [(time, index) for index, time in enumerate(self._times_s)]

    def following_requests(self, request: int, end_s: float) -> Sequence[tuple[float, int]]:
        return ()


class TurnsWait(OpenLoop):
    """Each request at its time in the trace, or after the previous turn's answer if later."""

    def __init__(self, workload: Workload, stretch: float = 1.0) -> None:
        super().__init__(workload, stretch)
        self._next_turn = workload.next_turn

    def first_requests(self) -> Sequence[tuple[float, int]]:
        followers = set(self._next_turn)
        return [(t, i) for t, i in super().first_requests() if i not in followers]

    def following_requests(self, request: int, end_s: float) -> Sequence[tuple[float, int]]:
        following = self._next_turn[request]
        return [] if following < 0 else [(max(self._times_s[following], end_s), following)]


class ClosedLoop:
    """Agents: each turn is sent after the previous turn's answer and a think time.

    Sessions start at ``sessions_per_hour`` with exponential gaps (``seed``), in the order of the
    trace; without a rate, at the trace's times. ``trace/sessions.py`` has the links and think times.
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
            _check_positive("sessions_per_hour", sessions_per_hour)
        if think_cap_s is not None and not think_cap_s >= 0:
            raise CanopyError(f"think_cap_s must be 0 or more, got {think_cap_s!r}")
        links = turn_links(workload.trace, think_cap_s)
        self._following: dict[int, list[tuple[float, int]]] = {}
        first_indices = []
        for index, previous in enumerate(links.previous):
            if previous < 0:
                first_indices.append(index)
            else:
                self._following.setdefault(previous, []).append((links.think_s[index], index))
        if sessions_per_hour is None:
            self._first_requests = [(workload.times_s[index], index) for index in first_indices]
        else:
            rng, now_s, self._first_requests = random.Random(seed), 0.0, []
            for index in first_indices:
                now_s += rng.expovariate(sessions_per_hour / 3600)
                self._first_requests.append((now_s, index))

    def first_requests(self) -> Sequence[tuple[float, int]]:
        return self._first_requests

    def following_requests(self, request: int, end_s: float) -> Sequence[tuple[float, int]]:
        return [(end_s + think_s, index) for think_s, index in self._following.get(request, ())]


def _check_positive(name: str, value: float) -> None:
    if not 0 < value < float("inf"):
        raise CanopyError(f"{name} must be a number above 0, got {value!r}")
