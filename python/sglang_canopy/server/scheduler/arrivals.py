"""Pass a scheduler's new requests and hints to the tree."""

from __future__ import annotations

import logging
from collections.abc import Callable
from http import HTTPStatus
from typing import Any

from sglang_canopy.radix.counters import GIVEN_UP, INVALID, QUEUE
from sglang_canopy.radix.live_request import is_refused
from sglang_canopy.records import LateHint
from sglang_canopy.server.scheduler.admission import admission_of, take_times
from sglang_canopy.server.scheduler.observer import observer_of
from sglang_canopy.tenant import is_documents_key, isolate_adapter_keys, unreserved_key
from sglang_canopy.wire import messages
from sglang_canopy.wire.hints import unpack
from sglang_canopy.wire.request_state import state_of

logger = logging.getLogger(__name__)

_created_callbacks: list[Callable[[Any, Any], bool]] = []
_queued_callbacks: list[Callable[[Any, Any], object]] = []


def subscribe(created: Callable[[Any, Any], bool], queued: Callable[[Any, Any], object]) -> None:
    """Call another plugin's functions with the scheduler and each request. ``created`` returns whether
    the request is late, that is, registered only when it is queued."""
    if created not in _created_callbacks:
        _created_callbacks.append(created)
        _queued_callbacks.append(queued)


def register_created(req: Any, scheduler: Any, recv_req: Any, *_: Any, **__: Any) -> None:
    """Hook after ``Scheduler._create_generation_req``, on every server with the plugin."""
    state_of(req)
    if req.extra_key and is_documents_key(req.extra_key):
        req.extra_key = unreserved_key(req.extra_key)
    if scheduler.enable_lora and _core(scheduler) is not None:
        isolate_adapter_keys(req)
    are_late = [on_created(scheduler, req) for on_created in _created_callbacks]
    # Images get their own tokens later; until then all images look alike. A late request gets its
    # extra key when it is queued.
    if recv_req is not None and recv_req.mm_inputs is None and not any(are_late):
        _register(scheduler, req)


def register_queued(scheduler: Any, req: Any, *_: Any, **__: Any) -> None:
    """Hook before ``Scheduler._add_request_to_queue``."""
    # SGLang calls no hook for an embedding's request, and before 0.5.23 for none at all.
    if not hasattr(req, "canopy"):
        register_created(req, scheduler, None)
    for on_queued in _queued_callbacks:
        on_queued(scheduler, req)
    _register(scheduler, req)
    admission = admission_of(scheduler)
    # SGLang matches a request that waits alone, as it admits it.
    if admission is not None and scheduler.waiting_queue:
        admission.order.look_up(req)
    if is_refused(req):  # SGLang queues an invalid request with its reason
        _count_refusal(scheduler, req, INVALID)


def admit_batch(batch: Any, *_: Any, **__: Any) -> None:
    """Hook before ``ScheduleBatch.prepare_for_extend``: admit the requests of ``batch``."""
    if (core := _core(batch)) is not None:
        for req in batch.reqs:
            core.requests.admit(req)


def end_aborted(_result: Any, scheduler: Any, abort: Any, req: Any, *_: Any, **__: Any) -> None:
    """Hook after ``Scheduler.send_abort_output``: count a request that was not admitted, and end
    another."""
    reason = abort.finished_reason or {}
    status = reason.get("status_code")
    # This error has the status of a full queue.
    is_priority_error = "priority is disabled" in reason.get("message", "")
    if status == HTTPStatus.SERVICE_UNAVAILABLE and not is_priority_error:
        refusal = QUEUE
    else:
        refusal = GIVEN_UP if status is None else INVALID
    _count_refusal(scheduler, req, refusal)
    if (admission := admission_of(scheduler)) is not None:
        admission.forget(req)
    if (core := _core(scheduler)) is not None:
        core.requests.record_abort(req.canopy.request)


def receive_messages(original: Any, scheduler: Any, recv_req: Any) -> Any:
    """Hook around ``Scheduler.set_internal_state``: handle Canopy's messages, or call SGLang's function. One
    hook for all kinds, since SGLang warns of two around one function."""
    updated = messages.handle_messages(scheduler, recv_req.server_args)
    if updated is None:
        return original(scheduler, recv_req)
    from sglang.srt.managers.io_struct import SetInternalStateReqOutput

    return SetInternalStateReqOutput(updated=updated)


def _apply_hints(scheduler: Any, texts: list[str]) -> bool:
    core, admission = _core(scheduler), admission_of(scheduler)
    if core is None:
        return False
    for hint in (LateHint(**fields) for text in texts for fields in unpack(text)):
        core.conversations.apply_hint(hint)
        if admission is not None and admission.gate is not None and hint.over:
            admission.gate.hint_over(hint.tenant, hint.conversation)
    return True


def _explain(scheduler: Any, texts: list[str]) -> bool:
    from sglang_canopy.radix.explain import explain, parse_question
    from sglang_canopy.telemetry import reporter

    core, question = _core(scheduler), parse_question(texts[-1])
    if core is None or question is None:
        return False
    name, body = question
    try:
        reporter.write_answer(name, explain(core, body))
    except OSError:
        logger.warning("canopy: no answer could be written", exc_info=True)
        return False
    return True


def _begin_drain(scheduler: Any, _texts: list[str]) -> bool:
    if (core := _core(scheduler)) is not None:
        core.disk.begin_drain(scheduler.tree_cache.drain_s)
    return core is not None


messages.register_handler(messages.TIME, take_times)
messages.register_handler(messages.DRAIN, _begin_drain)
messages.register_handler(messages.EXPLAIN, _explain)
messages.register_handler(messages.HINTS, _apply_hints)


def _register(scheduler: Any, req: Any) -> None:
    if (core := _core(scheduler)) is not None:
        core.requests.register(req)


def _count_refusal(scheduler: Any, req: Any, reason: int) -> None:
    if (core := _core(scheduler)) is not None:
        core.requests.refuse(core.requests.register(req), reason)
    elif (observer := observer_of(scheduler)) is not None:
        observer.refuse(req, reason)


def _core(owner: Any) -> Any:
    """Return the tree of a scheduler or batch, if a Canopy policy ranks it."""
    from sglang_canopy.radix.core import CanopyTreeCore

    core = getattr(owner.tree_cache, "tree_core", None)
    return core if isinstance(core, CanopyTreeCore) else None
