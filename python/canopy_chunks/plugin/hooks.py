"""Hooks of document reuse, installed only on a server with ``--canopy-chunks``.

The hooks decide whether a request is affected; the functions that they call do not check again.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from canopy_chunks import ATTRIBUTE
from canopy_chunks.plugin import series
from canopy_chunks.plugin import usage as usage_of
from sglang_canopy.config import server_options
from sglang_canopy.request import sent
from sglang_canopy.request.prompt import BODY_CHECKS
from sglang_canopy.request.sent import body_of, headers_of
from sglang_canopy.server.scheduler import arrivals
from sglang_canopy.server.start.seam import Seam
from sglang_canopy.server.start.self_check import check_in_place
from sglang_canopy.wire import status_file
from sglang_canopy.wire.document_names import BOUNDS
from sglang_canopy.wire.messages import CHUNKS, register


def options_of(server_args: Any) -> Any:
    """Return a server's options, or ``None`` without document reuse."""
    return getattr(server_args, ATTRIBUTE, None)


def engine_of(scheduler: Any) -> Any:
    """Return a scheduler's ``ChunkEngine``, or ``None`` without document reuse or during start."""
    return _engine_of_runner(getattr(getattr(scheduler, "tp_worker", None), "model_runner", None))


def _engine_of_runner(runner: Any) -> Any:
    return getattr(runner, "canopy_chunks", None)


def _scheduler_side() -> Any:
    from canopy_chunks.server import scheduler

    return scheduler


def _build(original: Any, scheduler: Any, server_args: Any, *args: Any, **kwargs: Any) -> Any:
    check_in_place(SEAMS)
    on = options_of(server_args)
    if on is None:
        return original(scheduler, server_args, *args, **kwargs)
    _scheduler_side().build(original, scheduler, server_args, on, *args, **kwargs)
    series.start(engine_of(scheduler).status, server_args.enable_metrics)
    return None


def _pool_budget(original: Any, configurator: Any, budget_bytes: int, **kwargs: Any) -> Any:
    on = options_of(configurator.server_args)
    if on is None:
        return original(configurator, budget_bytes, **kwargs)
    return _scheduler_side().pool_budget(original, configurator, budget_bytes, on, **kwargs)


def request_created(scheduler: Any, req: Any) -> bool:
    """Return whether a created request has documents; its extra key is set when it is queued."""
    if (engine := engine_of(scheduler)) is not None:
        _scheduler_side().request_created(engine, req)
    return getattr(req, "canopy_chunks", None) is not None


def request_queued(scheduler: Any, req: Any) -> bool:
    """Set the extra key of a queued request with documents. Returns whether it has documents."""
    if getattr(req, "canopy_chunks", None) is None:
        return False
    _scheduler_side().request_queued(engine_of(scheduler), req)
    return True


def _adder_class(found: Any, scheduler: Any, *_: Any, **__: Any) -> Any:
    engine = engine_of(scheduler)
    if engine is None:
        return None
    made = _scheduler_side().prefill_adder_class(found)
    made.canopy_engine = engine
    return made


def _idle(scheduler: Any, *_: Any, **__: Any) -> None:
    if (engine := engine_of(scheduler)) is not None:
        _scheduler_side().work_when_idle(engine, scheduler)


def _flushed(success: Any, scheduler: Any, *_: Any, **__: Any) -> None:
    if (engine := engine_of(scheduler)) is not None:
        _scheduler_side().flushed(engine, success)


def _internal_state(result: Any, scheduler: Any, *_: Any, **__: Any) -> None:
    if (engine := engine_of(scheduler)) is not None:
        _scheduler_side().add_internal_state(engine, result)


def _run_commands(scheduler: Any, commands: list[str]) -> bool | None:
    engine = engine_of(scheduler)
    return None if engine is None else bool(_scheduler_side().run_commands(engine, commands))


def _forward(original: Any, worker: Any, batch: Any = None, *args: Any, **kwargs: Any) -> Any:
    engine = _engine_of_runner(worker.model_runner)
    if engine is None or batch is None:
        return original(worker, batch, *args, **kwargs)
    from canopy_chunks.server import forward

    return forward.forward(original, worker, engine, batch, *args, **kwargs)


def _positions(forward_batch: Any, cls: Any, batch: Any, runner: Any, *_: Any, **__: Any) -> None:
    if _engine_of_runner(runner) is not None:
        from canopy_chunks.server import forward

        forward.set_positions(forward_batch, runner)


def _check_insert(cache: Any, req: Any, *_: Any, **__: Any) -> None:
    if (request := getattr(req, "canopy_chunks", None)) is not None:
        _scheduler_side().check_insert(request, req)


def _complete_report(req: Any, *_: Any, **__: Any) -> None:
    if (request := getattr(req, "canopy_chunks", None)) is not None:
        _scheduler_side().complete_report(request)


def _request_level(original: Any, streamer: Any, key: str) -> bool:
    return key == BOUNDS or original(streamer, key)


def _prepare(manager: Any, obj: Any, request: Any = None, *_: Any, **__: Any) -> None:
    if (on := options_of(manager.server_args)) is not None:
        from canopy_chunks.server.http import entry

        carriers = server_options.options_of(manager.server_args).requests.carriers
        # The owner of a prompt's documents is the tenant named in any of these carriers.
        sent.set_tenant(obj, headers_of(request), body_of(request), carriers)
        entry.prepare(manager, obj, on, sent.path_of(request))


def _report_documents(answers: Any, manager: Any, *_: Any, **__: Any) -> Any:
    """Hook after ``TokenizerManager.generate_request``; ``None`` leaves its answers unchanged."""
    on = options_of(manager.server_args)
    return None if on is None else usage_of.with_reports(answers)


def _response_usage(usage: Any, responses: Any, n_choices: int = 1, *_: Any, **__: Any) -> None:
    usage_of.of_answers(usage, responses, n_choices)


def _streaming_usage(
    usage: Any, *_: Any, cached_tokens: Any = None, n_choices: int = 1, **__: Any
) -> None:
    usage_of.of_stream(usage, cached_tokens or {}, n_choices)


def _convert_chat(original: Any, serving: Any, request: Any, raw_request: Any = None) -> Any:
    on = options_of(serving.tokenizer_manager.server_args)
    if on is None:
        return original(serving, request, raw_request)
    from canopy_chunks.server.http import entry

    return entry.convert_chat(original, serving, request, on, raw_request)


def _add_routes(server_args: Any, *_: Any, **__: Any) -> None:
    if (on := options_of(server_args)) is not None:
        from canopy_chunks.server.http import entry, routes, warm_up

        BODY_CHECKS["documents"] = functools.partial(entry.check_body, server_args.tp_size)
        if series.STATUS not in status_file.ADDITIONS:
            status_file.ADDITIONS.append(series.STATUS)
        routes.add_routes(server_args, on)
        warm_up.register(on)


_SRT = "sglang.srt."
_USAGE_OF = _SRT + "entrypoints.openai.usage_processor.UsageProcessor."
_COMMON = _SRT + "mem_cache.common."
_SCHEDULER = _SRT + "managers.scheduler.Scheduler."

_HOOKS: tuple[tuple[str, str, Callable[..., Any], tuple[str, ...]], ...] = (
    (_SRT + "entrypoints.http_server.launch_server", "before", _add_routes, ("server_args",)),
    (_SCHEDULER + "__init__", "around", _build, ("self", "server_args")),
    (
        _SRT + "mem_cache.kv_cache_configurator.KVCacheConfigurator.config_from_budget",
        "around",
        _pool_budget,
        ("self", "budget_bytes"),
    ),
    (_SCHEDULER + "get_prefill_adder_class", "after", _adder_class, ("self",)),
    (_SCHEDULER + "on_idle", "before", _idle, ("self",)),
    (_SCHEDULER + "flush_cache", "after", _flushed, ("self",)),
    (_SCHEDULER + "get_internal_state", "after", _internal_state, ("self", "recv_req")),
    (
        _SRT + "managers.tp_worker.TpModelWorker.forward_batch_generation",
        "around",
        _forward,
        ("self", "batch"),
    ),
    (
        _SRT + "model_executor.forward_batch_info.ForwardBatch.init_new",
        "after",
        _positions,
        ("cls", "batch", "model_runner"),
    ),
    (
        _SRT + "mem_cache.unified_radix_cache.UnifiedRadixCache.checkpoint_into_tree",
        "before",
        _check_insert,
        ("self", "req"),
    ),
    (_COMMON + "checkpoint_kv_cache", "before", _complete_report, ("req",)),
    (_COMMON + "release_kv_cache", "before", _complete_report, ("req",)),
    (
        _SRT
        + "managers.scheduler_components.output_streamer.SchedulerOutputStreamer"
        + ".is_request_level_customized_info_key",
        "around",
        _request_level,
        ("self", "key"),
    ),
    (
        _SRT + "managers.tokenizer_manager.TokenizerManager.generate_request",
        "before",
        _prepare,
        ("self", "obj", "request"),
    ),
    (
        _SRT + "managers.tokenizer_manager.TokenizerManager.generate_request",
        "after",
        _report_documents,
        ("self", "obj", "request"),
    ),
    (_USAGE_OF + "calculate_response_usage", "after", _response_usage, ("responses", "n_choices")),
    (
        _USAGE_OF + "calculate_streaming_usage",
        "after",
        _streaming_usage,
        ("prompt_tokens", "reasoning_tokens", "completion_tokens", "cached_tokens", "n_choices"),
    ),
    (
        _SRT + "entrypoints.openai.serving_chat.OpenAIServingChat._convert_to_internal_request",
        "around",
        _convert_chat,
        ("self", "request", "raw_request"),
    ),
)
"""``(target, kind of hook, hook, leading parameters)``."""

SEAMS = tuple(Seam(*hook, purpose="reuse documents, with `--canopy-chunks`") for hook in _HOOKS)


def attach() -> None:
    """Register the callbacks for new requests, and the handler of commands."""
    arrivals.attach(request_created, request_queued)
    register(CHUNKS, _run_commands)
