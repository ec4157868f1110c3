"""Hooks on SGLang's waiting queue, and the options they use."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from sglang_canopy.config.queue import BOUNDED_SHORTEST, FLAG, QueueFlags
from sglang_canopy.config.refusals import unsupported
from sglang_canopy.config.setups import QUEUE
from sglang_canopy.declared import from_args, option_of
from sglang_canopy.errors import CanopyError
from sglang_canopy.server.scheduler import observer

if TYPE_CHECKING:
    from sglang_canopy.server.scheduler.live_queue import LiveQueue


def checked(server_args: Any, args: Any, ours: bool, unless_given: Mapping[str, Any]) -> QueueFlags:
    """Return the options, checked against the rest of the command line. Raises ``CanopyError``.

    ``ours``: whether the device's policy is one of Canopy's. ``unless_given``: defaults of fields
    that are not on the command line.
    """
    value = from_args(QueueFlags, args)
    options = QueueFlags(**{**unless_given, **value})
    if value and not ours:
        flag = option_of(QueueFlags, next(iter(value))).flag
        raise CanopyError(f"{flag} needs --radix-eviction with a Canopy policy, such as wa")
    if options.queue_order == BOUNDED_SHORTEST:
        if server_args.schedule_policy != "fcfs":
            raise CanopyError(
                f"{FLAG} {BOUNDED_SHORTEST} replaces --schedule-policy "
                f"{server_args.schedule_policy}; drop one"
            )
        refuse_unsupported(options, server_args)
    return options


def refuse_unsupported(options: QueueFlags, *configured: Any) -> None:
    """Raise ``CanopyError`` if this server cannot have the queue order of ``options``."""
    if options.queue_order == BOUNDED_SHORTEST:
        refusal = unsupported(QUEUE, *configured)
        if refusal:
            raise CanopyError(f"{FLAG} {BOUNDED_SHORTEST}: {refusal}")


def priorities_calculated(
    original: Any,
    policy: Any,
    waiting_queue: list[Any],
    running_batch: Any = None,
    processed_tokens: int = 0,
) -> None:
    """Hook around ``SchedulePolicy.calc_priority``, once per scheduling pass."""
    queue = _queue(policy.tree_cache)
    if queue is None or not queue.orders:
        original(policy, waiting_queue, running_batch, processed_tokens)
    else:
        queue.arrange(waiting_queue, _urgency(policy))
    if queue is not None:
        queue.protect(waiting_queue)
        if queue.orders:
            queue.exclude_over_budget(waiting_queue)


def chunk_limited(
    original: Any,
    policy: Any,
    chunked_req: Any,
    waiting_queue: list[Any],
    budget: int,
    page_size: int,
) -> int | None:
    """Hook around ``SchedulePolicy.shortest_prefill_chunk_limit``, during a chunked prefill."""
    queue = _queue(policy.tree_cache)
    if queue is None or not queue.orders or budget < 2 * page_size:
        return original(policy, chunked_req, waiting_queue, budget, page_size)
    return queue.chunk_limit(chunked_req, waiting_queue, budget, page_size)


def admission_selected(
    original: Any, adder: Any, req: Any, *args: Any, has_chunked_req: bool = False, **kwargs: Any
) -> Any:
    """Hook around ``PrefillAdder._select_prefill_admission``: refuse a second unfinished prompt.

    SGLang tracks one unfinished prompt, the last of a batch. An earlier unfinished prompt would
    count as complete, and be answered from a part of it. SGLang prevents this because the remaining
    room is less than a page; sharing steps and reusing documents leave more.
    """
    found = original(adder, req, *args, has_chunked_req=has_chunked_req, **kwargs)
    unfinished = has_chunked_req or adder.new_chunked_req is not None
    if not unfinished or not getattr(found, "is_chunked", False):
        return found
    from sglang.srt.managers.schedule_policy import AddReqResult

    return AddReqResult.OTHER


def prefill_chosen(scheduler: Any, running: Any, choose: Callable[[], Any]) -> Any:
    """Hook around the choice of a prefill batch, inside all other hooks around it.

    ``running``: the batch that decodes.
    """
    queue = _queue(scheduler.tree_cache)
    if queue is None or not queue.orders:
        return choose()
    return queue.choose(scheduler, running, choose)


def request_queued(scheduler: Any, req: Any) -> None:
    """Hook before ``Scheduler._add_request_to_queue``, after the tree has received the request."""
    queue = _queue(scheduler.tree_cache)
    if queue is not None and (scheduler.waiting_queue or queue.orders):
        queue.queued(req)


def batch_computed(_result: Any, scheduler: Any, batch: Any, *_: Any, **__: Any) -> None:
    """Hook after ``Scheduler.process_batch_result``."""
    queue = _queue(scheduler.tree_cache)
    if queue is not None and queue.measures:
        queue.computed(batch)
    observed = observer.observer_of(scheduler)
    if observed is not None:
        observed.computed(batch)


def _urgency(policy: Any) -> Any:
    """Return a function from a request to its priority; higher is more urgent."""
    if not policy.enable_priority_scheduling:
        return lambda _req: 0
    sign = -policy.priority_sign
    return lambda req: sign * (req.priority or 0)


def _queue(cache: Any) -> LiveQueue | None:
    return getattr(cache, "canopy_queue", None)
