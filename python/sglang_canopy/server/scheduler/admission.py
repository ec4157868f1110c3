"""Owner of one scheduler's waiting queue: which requests SGLang may choose from, and in which order.

The session gate holds requests, and the order (``live_order.py``) sorts the others. While a prefill
batch is chosen, SGLang's queue has only the requests that may be admitted; then the others return to
their places, so that aborts, time limits, the limit on queued requests and all counts work as before.
All decisions follow from the requests, their stamps and the scheduler's own state, which are equal on
all tensor-parallel ranks.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from sglang_canopy import releases
from sglang_canopy.admission.gate import SessionGate
from sglang_canopy.radix.live_request import RequestPhase
from sglang_canopy.server.scheduler.observer import observer_of

if TYPE_CHECKING:
    from sglang_canopy.server.scheduler.live_order import LiveOrder


class Admission:
    """Order and gate of one scheduler. A request is the ticket of its turn at the gate."""

    def __init__(self, order: LiveOrder, gate: SessionGate | None = None) -> None:
        self.order, self.gate = order, gate
        self._waiting: set[Any] = set()
        """Requests in SGLang's queue; not tracked without a gate."""
        self._candidates: list[Any] | None = None
        """The whole queue, while SGLang chooses from a part of it."""
        self._held_requests: list[Any] = []
        """Requests left out of that part because they are held."""
        self._over_budget: list[Any] = []
        """Requests left out because they would overdraw an older request's budget."""
        self._chunked_req: Any = None
        """The chunked prefill in progress, while SGLang chooses."""

    def enqueue(self, scheduler: Any, req: Any) -> None:
        """Register ``req``, which SGLang appends to its queue next. A retracted one keeps its place at
        the gate."""
        gate = self.gate
        if self._candidates is not None:
            self._candidates.append(req)
        if gate is None:
            return
        request = req.canopy.request
        has_error = req.finished() or req.to_finish is not None
        if request.warm_up is not None:
            request.seniority = request.warm_up.seniority
        elif not (has_error or request.is_health_probe or req in gate.requests):
            self._forget_departed(scheduler)
            gate.advance(gate.now)
            request.seniority = gate.arrive(req, request).number
        self._waiting.add(req)

    def forget(self, req: Any) -> None:
        """Drop ``req``, which was answered or left. Further calls have no effect."""
        self._waiting.discard(req)
        if self.gate is not None:
            request = req.canopy.request
            if request.phase is RequestPhase.DONE:
                self.gate.finish(req, request)
            else:
                self.gate.leave(req)
        if self.order.is_on:
            self.order.forget(req)

    def record_batch(self, batch: Any) -> None:
        """Record the time of a computed batch, and its requests that have ended."""
        if self.order.is_on:
            self.order.record_batch(batch)
        if self.gate is not None or self.order.is_on:
            for req in batch.reqs:
                if req.finished():
                    self.forget(req)

    def set_time(self, scheduler: Any, now: float) -> None:
        """Advance the gate to the time sent by the HTTP process."""
        if self.gate is not None and math.isfinite(now):
            self._forget_departed(scheduler)
            self.gate.advance(now)

    def choose(self, scheduler: Any, running: Any, choose_by_sglang: Callable[[], Any]) -> Any:
        """Let SGLang choose a batch among the requests that may be admitted. ``running``: the batch
        that decodes."""
        gate, order = self.gate, self.order
        if gate is None and not order.is_on:
            return choose_by_sglang()
        self._forget_departed(scheduler, running)
        is_holding = gate is not None and bool(gate.waiting)
        may_hold = gate is not None and (is_holding or gate.activation.is_active)
        if not may_hold and not order.is_on:
            return self._admit(choose_by_sglang())
        candidates = self._candidates = scheduler.waiting_queue
        self._chunked_req = scheduler.chunked_req
        if gate is not None:
            gate.advance(gate.now)
        scheduler.waiting_queue = [*candidates]
        if is_holding:  # the oldest session first
            self._leave_out_held(scheduler.waiting_queue)
            scheduler.waiting_queue.sort(key=lambda req: req.canopy.request.seniority)
        try:
            return self._admit(choose_by_sglang())
        finally:
            if self._held_requests or self._over_budget:
                waiting = {*scheduler.waiting_queue, *self._held_requests, *self._over_budget}
                scheduler.waiting_queue = [req for req in candidates if req in waiting]
            self._candidates, self._chunked_req = None, None
            self._held_requests, self._over_budget = [], []

    def arrange(
        self, queue: list[Any], priority_sign: int, sort_by_sglang: Callable[[], None]
    ) -> None:
        """Sort SGLang's ``queue``. While it chooses, leave out what would overdraw an older request's
        budget, and held requests that have joined meanwhile.

        ``priority_sign``: SGLang's, 1 if lower priorities are more urgent, else -1; 0 without priorities.
        """
        order, is_choosing = self.order, self._candidates is not None
        if is_choosing and self.gate is not None and self.gate.waiting:
            self._leave_out_held(queue)
        if order.is_on:
            order.priority_sign = priority_sign
            queue[:] = order.arranged.arrange(queue, self._chunked_req)
        else:
            sort_by_sglang()
        order.protect(queue)
        if order.is_on and is_choosing:
            self._leave_out(order.arranged.over_budget(), queue)

    def share_step(
        self, chunked: Any, queue: list[Any], step_tokens: int, page_tokens: int
    ) -> int | None:
        """Return the tokens that ``chunked`` may take of the next step; ``None`` for no limit. Moves
        the requests that share the step to the head of ``queue``; without any there is no limit."""
        shared = self.order.share_step(chunked, step_tokens, page_tokens)
        if shared is None:
            return None
        left_out, limit_tokens = shared
        self._leave_out(left_out, queue)
        return limit_tokens

    def _leave_out(self, left_out: list[Any], queue: list[Any]) -> None:
        """Set ``queue`` to the current order without ``left_out``."""
        self._over_budget, excluded = left_out, set(left_out)
        queue[:] = [req for req in self.order.arranged.current() if req not in excluded]

    def _leave_out_held(self, queue: list[Any]) -> None:
        assert self.gate is not None
        held = {req: None for req in queue if self.gate.holds(req)}
        self._held_requests += held
        queue[:] = [req for req in queue if req not in held]

    def _admit(self, chosen: Any) -> Any:
        """Record the requests of a chosen batch as admitted; return ``chosen``."""
        batch, _ = chosen
        if batch is not None:
            for req in batch.reqs:
                self._waiting.discard(req)
            if self.order.is_on:
                self.order.arranged.admit(batch.reqs)
        return chosen

    def _forget_departed(self, scheduler: Any, *batches: Any) -> None:
        """Forget requests that left SGLang's queue without a call, as all do before 0.5.23.
        ``batches``: in progress, and not referenced by the scheduler yet."""
        queue, gate, arranged = scheduler.waiting_queue, self.gate, self.order.arranged
        if self._candidates is not None:
            return
        count = len(queue)
        is_unchanged = count >= len(arranged) if gate is None else count == len(self._waiting)
        if is_unchanged and (not batches or releases.reports_aborts(scheduler)):
            return
        present = {*queue, scheduler.chunked_req}
        for batch in (scheduler.running_batch, scheduler.last_batch, *batches):
            present.update(getattr(batch, "reqs", None) or ())
        tracked = dict.fromkeys((*arranged.requests(), *(() if gate is None else gate.requests)))
        for req in tracked:
            if req.finished() or req not in present:
                self.forget(req)
        if gate is not None:
            self._waiting = set(queue)


def admission_of(owner: Any) -> Admission | None:
    """Return the admission of a scheduler, or of another owner of its cache; ``None`` for SGLang's
    caches."""
    return getattr(owner.tree_cache, "admission", None)


def take_times(scheduler: Any, times: Iterable[str]) -> bool:
    """Pass the times in messages to the gate; ignore a text that is not a number."""
    if (admission := admission_of(scheduler)) is not None:
        for text in times:
            with contextlib.suppress(ValueError):
                admission.set_time(scheduler, float(text))
    return True


# ---- hooks ----


def enqueue_unrefused(original: Any, scheduler: Any, req: Any) -> bool:
    """Hook around ``Scheduler._abort_on_queued_limit``: register a request that is not refused. Returns
    whether SGLang refuses it."""
    if original(scheduler, req):
        return True
    if (admission := admission_of(scheduler)) is not None:
        admission.enqueue(scheduler, req)
    return False


def choose_prefill(original: Any, scheduler: Any, *args: Any, **kwargs: Any) -> Any:
    """Hook around ``Scheduler._get_new_batch_prefill_raw``."""
    admission = admission_of(scheduler)
    if admission is None:
        return original(scheduler, *args, **kwargs)
    running = kwargs.get("running_batch", args[-1] if args else None)
    return admission.choose(scheduler, running, lambda: original(scheduler, *args, **kwargs))


def arrange_queue(
    original: Any, policy: Any, waiting_queue: list[Any], *args: Any, **kwargs: Any
) -> None:
    """Hook around ``SchedulePolicy.calc_priority``, once per scheduling pass."""
    admission = admission_of(policy)
    sort_by_sglang = functools.partial(original, policy, waiting_queue, *args, **kwargs)
    if admission is None:
        sort_by_sglang()
    else:
        sign = policy.priority_sign if policy.enable_priority_scheduling else 0
        admission.arrange(waiting_queue, sign, sort_by_sglang)


def limit_chunk(
    original: Any,
    policy: Any,
    chunked_req: Any,
    waiting_queue: list[Any],
    budget: int,
    page_size: int,
) -> int | None:
    """Hook around ``SchedulePolicy.shortest_prefill_chunk_limit``, during a chunked prefill."""
    admission = admission_of(policy)
    if admission is None or not admission.order.is_on or budget < 2 * page_size:
        return original(policy, chunked_req, waiting_queue, budget, page_size)
    return admission.share_step(chunked_req, waiting_queue, budget, page_size)


def refuse_second_chunk(
    original: Any, adder: Any, req: Any, *args: Any, has_chunked_req: bool = False, **kwargs: Any
) -> Any:
    """Hook around ``PrefillAdder._select_prefill_admission``: refuse a second unfinished prompt. SGLang
    tracks one unfinished prompt, the last of a batch. An earlier unfinished prompt would count as
    complete, and be answered from a part of it. SGLang prevents this because the remaining room is less
    than a page; sharing steps and reusing documents leave more."""
    selected = original(adder, req, *args, has_chunked_req=has_chunked_req, **kwargs)
    has_unfinished = has_chunked_req or adder.new_chunked_req is not None
    if not has_unfinished or not getattr(selected, "is_chunked", False):
        return selected
    from sglang.srt.managers.schedule_policy import AddReqResult

    return AddReqResult.OTHER


def record_batch_result(_result: Any, scheduler: Any, batch: Any, *_: Any, **__: Any) -> None:
    """Hook after ``Scheduler.process_batch_result``."""
    if (admission := admission_of(scheduler)) is not None:
        admission.record_batch(batch)
    if (observer := observer_of(scheduler)) is not None:
        observer.record_batch(batch)
