"""Hooks of document reuse, installed only on a server with ``--canopy-documents``.

The hooks of a running scheduler and of the forward are functions of ``canopy_documents.server``; that
of the scheduler's start and those of the HTTP process are here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from canopy_documents import document_options_of
from canopy_documents.plugin import series
from canopy_documents.server import admission, conversion, forward, scheduler, start
from canopy_documents.server.request import engine_of
from sglang_canopy.config import server_options
from sglang_canopy.request import access, sent
from sglang_canopy.request.prompt import BODY_CHECKS
from sglang_canopy.server.scheduler import arrivals
from sglang_canopy.server.start.hook import Hook
from sglang_canopy.server.start.self_check import check_in_place
from sglang_canopy.tenant import tenant_of
from sglang_canopy.wire import status_file
from sglang_canopy.wire.messages import DOCUMENTS, register_handler, send


def _build(original: Any, server: Any, server_args: Any, *args: Any, **kwargs: Any) -> None:
    check_in_place(HOOKS)
    start.build(original, server, server_args, *args, **kwargs)
    if (engine := engine_of(server)) is not None:
        series.start(engine.counters, server_args.enable_metrics)


def _prepare(manager: Any, obj: Any, request: Any = None, *_: Any, **__: Any) -> None:
    if (options := document_options_of(manager.server_args)) is not None:
        body = _set_owner(manager, obj, request)
        conversion.prepare(manager, obj, options, sent.request_path(request), body)


def _set_owner(manager: Any, obj: Any, request: Any) -> Mapping[str, Any]:
    """Write the tenant named in any carrier into ``obj``: it owns the documents. Return the body."""
    carriers = server_options.options_of(manager.server_args).requests.carriers
    body = sent.body_of(request)
    sent.set_tenant(obj, sent.headers_of(request), body, carriers)
    return body


def _convert_chat(original: Any, serving: Any, request: Any, raw_request: Any = None) -> Any:
    options = document_options_of(serving.tokenizer_manager.server_args)
    if options is None:
        return original(serving, request, raw_request)
    _set_owner(serving.tokenizer_manager, request, raw_request)
    return conversion.convert_chat(original, serving, request, options, raw_request)


def _add_routes(server_args: Any, *_: Any, **__: Any) -> None:
    if document_options_of(server_args) is not None:
        BODY_CHECKS["documents"] = conversion.check_body
        if series.STATUS not in status_file.ADDED_KINDS:
            status_file.ADDED_KINDS.append(series.STATUS)
        add_routes()


def add_routes() -> None:
    """Add ``DELETE /canopy/documents`` to SGLang's routes."""
    from sglang.srt.entrypoints.http_server import app

    access.add_change_route(app, "DELETE", "/canopy/documents", _delete)


async def _delete(request: Any) -> dict[str, Any]:
    """Delete all documents of the requesting tenant, and all KV of its prompts, in every scheduler.

    As in SGLang's requests, ``extra_key`` and ``cache_salt`` name the tenant: in the query, or in
    headers.
    """
    from sglang.srt.entrypoints.http_server import get_global_state

    manager = get_global_state().tokenizer_manager
    tenant = tenant_of(**sent.tenant_fields(request))
    manager.auto_create_handle_loop()
    answers = await send(manager, DOCUMENTS, tenant or "")
    return {"deleted": any(bool(answer.updated) for answer in answers)}


_SRT = "sglang.srt."
_COMMON = _SRT + "mem_cache.common."
_SCHEDULER = _SRT + "managers.scheduler.Scheduler."
_MANAGER = _SRT + "managers.tokenizer_manager.TokenizerManager."

_TABLE: tuple[tuple[str, str, Callable[..., Any], tuple[str, ...]], ...] = (
    (_SRT + "entrypoints.http_server.launch_server", "before", _add_routes, ("server_args",)),
    (_SCHEDULER + "__init__", "around", _build, ("self", "server_args")),
    (
        _SRT + "mem_cache.kv_cache_configurator.KVCacheConfigurator.config_from_budget",
        "around",
        start.pool_budget,
        ("self", "budget_bytes"),
    ),
    (_SCHEDULER + "get_prefill_adder_class", "after", admission.use_document_adder, ("self",)),
    (_SCHEDULER + "on_idle", "before", scheduler.work_when_idle, ("self",)),
    (_SCHEDULER + "flush_cache", "after", scheduler.replace_stale_store, ("self",)),
    (_SCHEDULER + "get_internal_state", "after", scheduler.add_counters, ("self", "recv_req")),
    (
        _SRT + "managers.tp_worker.TpModelWorker.forward_batch_generation",
        "around",
        forward.forward,
        ("self", "batch"),
    ),
    (
        _SRT + "model_executor.forward_batch_info.ForwardBatch.init_new",
        "after",
        forward.set_positions,
        ("cls", "batch", "model_runner"),
    ),
    (
        _SRT + "mem_cache.unified_cache.components.base.TreeComponent.prepare_for_caching_req",
        "before",
        scheduler.check_insert,
        ("self", "req"),
    ),
    (_COMMON + "checkpoint_kv_cache", "before", scheduler.complete_report, ("req",)),
    (_COMMON + "release_kv_cache", "before", scheduler.complete_report, ("req",)),
    (
        _SRT
        + "managers.scheduler_components.output_streamer.SchedulerOutputStreamer"
        + ".is_request_level_customized_info_key",
        "around",
        scheduler.is_request_level,
        ("self", "key"),
    ),
    (_MANAGER + "generate_request", "before", _prepare, ("self", "obj", "request")),
    (
        _SRT + "entrypoints.openai.serving_chat.OpenAIServingChat._convert_to_internal_request",
        "around",
        _convert_chat,
        ("self", "request", "raw_request"),
    ),
)
"""``(target, kind of hook, hook, leading parameters)``."""

HOOKS = tuple(Hook(*hook, purpose="reuse documents, with `--canopy-documents`") for hook in _TABLE)


def attach() -> None:
    """Register the callbacks for new requests, and the handler of deletions."""
    arrivals.subscribe(scheduler.read_documents, scheduler.set_extra_key)
    register_handler(DOCUMENTS, scheduler.delete_documents)
