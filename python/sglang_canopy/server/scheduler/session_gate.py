"""The session gate in a scheduler: SGLang's queue is shown to it without what the gate holds.

A held request stays in SGLang's waiting queue, so that aborts, time limits, the limit on queued
requests and every count of it work as ever; only while a prefill batch is chosen the queue is
without it. All that happens here follows from the requests, their stamps and the scheduler's own
state, which are equal on all tensor-parallel ranks.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable
from http import HTTPStatus
from typing import Any

from sglang_canopy.admission.gate import SessionGate
from sglang_canopy.server.scheduler import queue
from sglang_canopy.server.scheduler.under_way import under_way
from sglang_canopy.wire.keys import RETRY_AFTER
from sglang_canopy.wire.keys import TIME as TIME_KEY

_ATTRIBUTE = "canopy_session_gate"


class ServerGate:
    """One scheduler's gate: which requests it knows, and what became of them."""

    def __init__(self, gate: SessionGate) -> None:
        self.gate = gate
        self._requests: dict[int, Any] = {}
        """SGLang's ``Req`` by ``id``, which is its ticket: waiting, or under way."""
        self._held: list[Any] = []
        """Out of the scheduler's queue, while a batch is chosen."""

    def request_comes(self, scheduler: Any, req: Any) -> float | None:
        """A request is about to enter the queue. Returns after how many seconds its client may try
        again, if it may not enter."""
        if not self._is_gated(req):
            return None
        self.settle(scheduler)
        ticket, first = id(req), req.canopy.first
        self._requests[ticket] = req
        if first is not None and first.session is not None:
            self.gate.join(ticket, req.canopy, first.session)
            return None
        req.canopy.session = self.gate.arrive(ticket, req.canopy)
        if not self.gate.refuses(ticket):
            return None
        retry_s = self.gate.retry_after_s(ticket)
        self.gate.refuse(ticket)
        del self._requests[ticket]
        return retry_s

    def with_admitted(self, scheduler: Any, batches: tuple[Any, ...], choose: Callable) -> Any:
        """Run ``choose`` while the scheduler's queue has only what the gate lets through."""
        gate = self.gate
        if not gate.pressed:
            return choose()
        self.settle(scheduler, *batches)
        before = scheduler.waiting_queue
        self._held = [req for req in before if gate.holds(id(req))]
        admitted = [req for req in before if not gate.holds(id(req))]
        admitted.sort(key=lambda req: gate.seniority(id(req)))
        scheduler.waiting_queue = admitted
        try:
            return choose()
        finally:
            left = {id(req): req for req in (*scheduler.waiting_queue, *self._held)}
            self._held = []
            # In the order in which they came; requests that were put back come last.
            kept = [left.pop(id(req)) for req in before if id(req) in left]
            scheduler.waiting_queue = [*kept, *left.values()]

    def settle(self, scheduler: Any, *batches: Any) -> None:
        """Tell the gate of all requests that have ended since it was last told."""
        if self._requests:
            present = {id(req) for req in (*scheduler.waiting_queue, *self._held)}
            present.update(map(id, under_way(scheduler, *batches)))
            for ticket, req in list(self._requests.items()):
                if req.finished() and req.canopy.done:
                    del self._requests[ticket]
                    self.gate.finish(ticket, req.canopy, warm_up=req.canopy.samples > 0)
                elif req.finished() or ticket not in present:
                    del self._requests[ticket]
                    self.gate.leave(ticket)
        self.gate.advance(self.gate.now)

    def time_is(self, scheduler: Any, time: float) -> None:
        """The HTTP process says what time it is."""
        self.settle(scheduler)
        if math.isfinite(time):
            self.gate.advance(time)

    def _is_gated(self, req: Any) -> bool:
        """Not those that came back from a batch, that only carry an error, or that ask whether
        the server is well."""
        from sglang.srt.managers.utils import is_health_check_generate_req

        return (
            id(req) not in self._requests
            and getattr(req, "canopy", None) is not None
            and not req.finished()
            and req.to_finish is None
            and not is_health_check_generate_req(req)
        )


def gate_of(scheduler: Any) -> ServerGate | None:
    """The scheduler's gate; ``None`` without ``--canopy-session-gate``."""
    if not hasattr(scheduler, _ATTRIBUTE):
        live = getattr(getattr(scheduler.tree_cache, "tree_core", None), "live", None)
        gate = getattr(live, "gate", None)
        setattr(scheduler, _ATTRIBUTE, None if gate is None else ServerGate(gate))
    return getattr(scheduler, _ATTRIBUTE)


def take_time(scheduler: Any, messages: Iterable[str]) -> bool:
    """Whether one of ``messages`` says what time it is; the gate is told."""
    times = [key for key in messages if str(key).startswith(TIME_KEY)]
    gate = gate_of(scheduler) if times else None
    if gate is not None:
        for key in times:
            with contextlib.suppress(ValueError):
                gate.time_is(scheduler, float(key.removeprefix(TIME_KEY)))
    return bool(times)


def queue_limited(original: Any, scheduler: Any, req: Any) -> bool:
    """Around ``Scheduler._abort_on_queued_limit``: whether ``req`` is refused, with the answer
    sent."""
    if original(scheduler, req):
        return True
    gate = gate_of(scheduler)
    retry_s = None if gate is None else gate.request_comes(scheduler, req)
    if retry_s is None:
        return False
    from sglang.srt.managers.scheduler import _make_abort_req

    message = (
        "No room for another session now: those under way need the memory. "
        f"Try again in {retry_s:.0f} seconds."
    )
    reason = {
        "type": "abort",
        "status_code": HTTPStatus.TOO_MANY_REQUESTS,
        "message": message,
        RETRY_AFTER: int(retry_s),
    }
    scheduler.send_abort_output(_make_abort_req(req, finished_reason=reason), req)
    req.time_stats.trace_ctx.abort(abort_info={"reason": message})
    return True


def prefill_chosen(original: Any, scheduler: Any, *args: Any, **kwargs: Any) -> Any:
    """Around ``Scheduler._get_new_batch_prefill_raw``."""
    gate = gate_of(scheduler)
    running = kwargs.get("running_batch", args[-1] if args else None)

    def choose() -> Any:
        return queue.prefill_chosen(
            scheduler, running, lambda: original(scheduler, *args, **kwargs)
        )

    return choose() if gate is None else gate.with_admitted(scheduler, (running,), choose)
