"""The session gate in a scheduler: hides the requests it holds from SGLang's queue.

A held request stays in SGLang's waiting queue, so that aborts, time limits, the limit on queued
requests and all counts work as before. Only while a prefill batch is chosen does the queue exclude
it. All decisions follow from the requests, their stamps and the scheduler's own state, which are
equal on all tensor-parallel ranks.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable
from typing import Any

from sglang_canopy.admission.gate import SessionGate
from sglang_canopy.server.scheduler import queue
from sglang_canopy.server.scheduler.running_requests import running_requests

_ATTRIBUTE = "canopy_session_gate"


class ServerGate:
    """One scheduler's gate, and the state of each gated request.

    Requests are keyed by ``id``, which is their ticket. A step reads the running requests; it reads
    the queue only if its length differs from the number of known waiting requests.
    """

    def __init__(self, gate: SessionGate) -> None:
        self.gate = gate
        gate.entered = self._let_through
        self._admissible: dict[int, Any] = {}
        """Waiting requests whose sessions are admitted."""
        self._held: dict[int, Any] = {}
        """Waiting requests whose sessions are not admitted."""
        self._running: dict[int, Any] = {}
        self._ungated: dict[int, Any] = {}
        """Waiting requests that are not gated, such as health checks."""
        self._choosing = False
        self.sweeps = 0
        """Number of sweeps of the whole queue."""

    def request_arrived(self, scheduler: Any, req: Any) -> None:
        """Register a request that is about to enter the queue."""
        ticket = id(req)
        if self._running.pop(ticket, None) is not None:  # retracted
            self._admissible[ticket] = req
        if ticket in self._admissible or ticket in self._held:
            return
        if not self._is_gated(req):
            self._ungated[ticket] = req
            return
        self.report_ended(scheduler)
        first = req.canopy.first
        if first is not None and first.session is not None:
            self.gate.join(ticket, req.canopy, first.session)
        else:
            req.canopy.session = self.gate.arrive(ticket, req.canopy)
        (self._held if self.gate.holds(ticket) else self._admissible)[ticket] = req

    def with_admitted(self, scheduler: Any, batches: tuple[Any, ...], choose: Callable) -> Any:
        """Run ``choose`` while the scheduler's queue has only admitted and ungated requests."""
        if not self.gate.has_waiting_sessions:
            return self._chosen(choose())
        self.report_ended(scheduler, *batches)
        before = scheduler.waiting_queue
        shown = [*self._ungated.values(), *self._by_seniority()]
        scheduler.waiting_queue, self._choosing = [*shown], True
        try:
            return self._chosen(choose())
        finally:
            self._choosing = False
            after = {id(req): req for req in scheduler.waiting_queue}
            taken = {id(req) for req in shown if after.pop(id(req), None) is None}
            if taken:
                before = [req for req in before if id(req) not in taken]
            # Requests that were put back are last.
            scheduler.waiting_queue = [*before, *after.values()] if after else before

    def _by_seniority(self) -> list[Any]:
        tickets = sorted(self._admissible, key=self.gate.seniority)
        return [self._admissible[ticket] for ticket in tickets]

    def _chosen(self, result: Any) -> Any:
        """Record the requests of a chosen prefill batch as running; return ``result``."""
        batch = result[0] if isinstance(result, tuple) else None
        self._start(getattr(batch, "reqs", ()))
        return result

    def _start(self, reqs: Iterable[Any]) -> set[int]:
        """Record that these requests run; return their tickets."""
        tickets = set()
        for req in reqs:
            ticket = id(req)
            tickets.add(ticket)
            for waiting in (self._admissible, self._held):
                if waiting.pop(ticket, None) is not None:
                    self._running[ticket] = req
            self._ungated.pop(ticket, None)
        return tickets

    def _let_through(self, tickets: set[Any]) -> None:
        # The order of a set of ids differs by rank, so several are taken in order of arrival.
        several = len(tickets) > 1
        for ticket in [one for one in self._held if one in tickets] if several else tickets:
            req = self._held.pop(ticket, None)
            if req is not None:
                self._admissible[ticket] = req

    def report_ended(self, scheduler: Any, *batches: Any) -> None:
        """Report all requests that have ended since the latest call to the gate."""
        running = self._start(running_requests(scheduler, *batches))
        lost = False
        for ticket, req in list(self._running.items()):
            if req.finished():
                del self._running[ticket]
                self._ended(ticket, req)
            elif ticket not in running:
                lost = True
        known = len(self._admissible) + len(self._held) + len(self._ungated)
        if not self._choosing and (lost or known != len(scheduler.waiting_queue)):
            self._sweep(scheduler, running)
        self.gate.advance(self.gate.now)

    def _sweep(self, scheduler: Any, running: set[int]) -> None:
        """Read the whole queue: a request was removed or put back without a call."""
        self.sweeps += 1
        queue = {id(req): req for req in scheduler.waiting_queue}
        for waiting in (self._admissible, self._held, self._running):
            for ticket, req in list(waiting.items()):
                if req.finished() or (ticket not in queue and ticket not in running):
                    waiting.pop(ticket, None)
                    self._ended(ticket, req)
        for ticket in self._running.keys() & queue.keys() - running:
            self._admissible[ticket] = self._running.pop(ticket)
        gated = self._admissible.keys() | self._held.keys()
        self._ungated = {key: req for key, req in queue.items() if key not in gated}

    def _ended(self, ticket: int, req: Any) -> None:
        if req.finished() and req.canopy.done:
            self.gate.finish(ticket, req.canopy, warm_up=req.canopy.samples > 0)
        else:
            self.gate.leave(ticket)

    def set_time(self, scheduler: Any, time: float) -> None:
        """Advance the gate to the time sent by the HTTP process."""
        self.report_ended(scheduler)
        if math.isfinite(time):
            self.gate.advance(time)

    def _is_gated(self, req: Any) -> bool:
        """Return whether ``req`` is gated. Requests with an error and health checks are not."""
        from sglang.srt.managers.utils import is_health_check_generate_req

        return (
            getattr(req, "canopy", None) is not None
            and not req.finished()
            and req.to_finish is None
            and not is_health_check_generate_req(req)
        )


def gate_of(scheduler: Any) -> ServerGate | None:
    """Return the scheduler's gate; ``None`` without ``--canopy-session-gate``."""
    if not hasattr(scheduler, _ATTRIBUTE):
        live = getattr(getattr(scheduler.tree_cache, "tree_core", None), "live", None)
        gate = getattr(live, "gate", None)
        setattr(scheduler, _ATTRIBUTE, None if gate is None else ServerGate(gate))
    return getattr(scheduler, _ATTRIBUTE)


def take_time(scheduler: Any, times: Iterable[str]) -> bool:
    """Pass the times in messages to the gate; ignore a text that is not a number."""
    if (gate := gate_of(scheduler)) is not None:
        for time in times:
            with contextlib.suppress(ValueError):
                gate.set_time(scheduler, float(time))
    return True


def queue_limited(original: Any, scheduler: Any, req: Any) -> bool:
    """Hook around ``Scheduler._abort_on_queued_limit``: register a request that is not refused.

    Returns whether SGLang refuses it.
    """
    if original(scheduler, req):
        return True
    if (gate := gate_of(scheduler)) is not None:
        gate.request_arrived(scheduler, req)
    return False


def prefill_chosen(original: Any, scheduler: Any, *args: Any, **kwargs: Any) -> Any:
    """Hook around ``Scheduler._get_new_batch_prefill_raw``."""
    gate = gate_of(scheduler)
    running = kwargs.get("running_batch", args[-1] if args else None)

    def choose() -> Any:
        return queue.prefill_chosen(
            scheduler, running, lambda: original(scheduler, *args, **kwargs)
        )

    return choose() if gate is None else gate.with_admitted(scheduler, (running,), choose)
