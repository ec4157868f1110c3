"""SGLang's overlapped event loop, run one turn at a time.

``Scheduler.event_loop_overlap`` launches a batch before it processes the result of the batch before, so
that requests arrive, leave and are preempted while results are in flight. SGLang's hook of scripted
schedulers is called once in each turn; here it ends the loop after that turn.
"""

import dataclasses
from collections import deque
from typing import Any

OVERLAP = "--overlap"
"""Argument of a worker, in place of SGLang's ``--disable-overlap-schedule``."""


class _InFlight:
    """The scheduler's ``result_queue``: the loop assigns a new one at its start, which is ignored."""

    def __get__(self, scheduler: Any, owner: type | None = None) -> Any:
        return scheduler.__dict__["result_queue"]

    def __set__(self, scheduler: Any, queue: deque[Any]) -> None:
        scheduler.__dict__.setdefault("result_queue", queue)


class Turns:
    """Turns of ``scheduler``'s overlapped loop, in this thread."""

    def __init__(self, scheduler: Any) -> None:
        if not scheduler.enable_overlap:
            raise AssertionError("SGLang has turned the overlap off")
        scheduler.__class__ = type(
            "Overlapped", (scheduler.__class__,), {"result_queue": _InFlight()}
        )
        scheduler._war_barrier_enabled = False  # run_event_loop sets it, for CUDA alone
        scheduler.idle_sleeper = None
        scheduler.request_receiver = dataclasses.replace(
            scheduler.request_receiver, scripted_scheduler_hook=self
        )
        self.scheduler = scheduler
        self.in_flight = 0
        """Turns at whose end a result was in flight."""

    def turn(self) -> None:
        """Run one turn. A paused engine only receives."""
        self.scheduler.gracefully_exit = False
        self.scheduler.event_loop_overlap()
        self.in_flight += bool(self.scheduler.result_queue)

    def step(self) -> None:
        """End the loop after the turn that has begun: SGLang calls this as it receives requests."""
        self.scheduler.gracefully_exit = True
