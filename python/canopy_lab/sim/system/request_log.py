"""Requests in the event log: each with its queue, prefill and decode, on a line of its own."""

from __future__ import annotations

from canopy_lab.sim.system.events import EventLog
from canopy_lab.sim.system.job import SimulatedRequest


class RequestLog:
    """The lines of one instance, as few as requests overlap."""

    def __init__(self, events: EventLog, instance: str) -> None:
        self._events = events
        self._instance = instance
        self._free_s: list[float] = []
        """When each line's last request ended."""

    def add(self, job: SimulatedRequest, now: float) -> None:
        """``job`` ended ``now``: log it and its parts, on the first line free all the while."""
        lines = self._free_s
        line = next((i for i, free in enumerate(lines) if free <= job.arrival), None)
        if line is None:
            line = len(lines)
            lines.append(0.0)
        lines[line] = now
        track, span = f"requests {line + 1}", self._events.span
        args = {"request": job.index + 1, "prompt": job.prompt, "output": job.output}
        hits = {"device": job.device_hit, "host": job.host_hit - job.disk_hit, "disk": job.disk_hit}
        span(self._instance, track, "request", job.arrival, now, **args, **hits)
        span(self._instance, track, "queue", job.arrival, job.start)
        span(self._instance, track, "prefill", job.start, job.first_token)
        if now > job.first_token:
            span(self._instance, track, "decode", job.first_token, now)
