"""Every function of SGLang that chunk reuse hooks, for the plugin's table of seams.

Light on purpose: the plugin imports this in every process, also where only ``--help`` is printed;
what needs torch or SGLang is imported when a hook runs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang_canopy.chunk.server import options


def _build(original: Any, scheduler: Any, server_args: Any, *args: Any, **kwargs: Any) -> Any:
    if getattr(server_args, options.ATTRIBUTE, None) is None:
        return original(scheduler, server_args, *args, **kwargs)
    from sglang_canopy.chunk.server import scheduler as side

    return side.build(original, scheduler, server_args, *args, **kwargs)


def _request_created(req: Any, scheduler: Any, *_: Any, **__: Any) -> None:
    if _on(scheduler):
        _side().request_created(req, scheduler)


def _adder_class(found: Any, scheduler: Any, *_: Any, **__: Any) -> Any:
    return _side().adder_class(found, scheduler) if _on(scheduler) else None


def _idle(scheduler: Any, *_: Any, **__: Any) -> None:
    if _on(scheduler):
        _side().use_idle_time(scheduler)


def _flushed(success: Any, scheduler: Any, *_: Any, **__: Any) -> None:
    if _on(scheduler):
        _side().flushed(success, scheduler)


def _tell(result: Any, scheduler: Any, *_: Any, **__: Any) -> None:
    if _on(scheduler):
        _side().tell(result, scheduler)


def _command(original: Any, scheduler: Any, recv_req: Any) -> Any:
    if not _on(scheduler):
        return original(scheduler, recv_req)
    return _side().command(original, scheduler, recv_req)


def _forward(original: Any, worker: Any, batch: Any = None, *args: Any, **kwargs: Any) -> Any:
    if getattr(worker.model_runner, "canopy_chunks", None) is None:
        return original(worker, batch, *args, **kwargs)
    from sglang_canopy.chunk.server import forward

    return forward.forward(original, worker, batch, *args, **kwargs)


def _positions(forward_batch: Any, cls: Any, batch: Any, runner: Any, *_: Any, **__: Any) -> None:
    if getattr(runner, "canopy_chunks", None) is not None:
        from sglang_canopy.chunk.server import forward

        forward.after_init_new(forward_batch, cls, batch, runner)


def _insert_guard(cache: Any, req: Any, *_: Any, up_to: int, **__: Any) -> None:
    if getattr(req, "canopy_chunks", None) is not None:
        _side().insert_guard(cache, req, up_to)


def _publish_head(req: Any, tree_cache: Any, *_: Any, **__: Any) -> None:
    if getattr(req, "canopy_chunks", None) is not None:
        _side().publish_head(req, tree_cache)


def _request_level(original: Any, streamer: Any, key: str) -> bool:
    return key == "canopy_chunks" or original(streamer, key)


def _prepare(manager: Any, obj: Any, *_: Any, **__: Any) -> None:
    if getattr(manager.server_args, options.ATTRIBUTE, None) is not None:
        from sglang_canopy.chunk.server import entry

        entry.prepare(manager, obj)


def _convert_chat(original: Any, serving: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
    manager = serving.tokenizer_manager
    if getattr(manager.server_args, options.ATTRIBUTE, None) is None:
        return original(serving, request, *args, **kwargs)
    from sglang_canopy.chunk.server import entry

    return entry.convert_chat(original, serving, request, *args, **kwargs)


async def _internal_route(original: Any, manager: Any, obj: Any, *args: Any, **kwargs: Any) -> Any:
    """Documents are commanded by their tenants' routes alone, which send commands themselves."""
    if getattr(manager.server_args, options.ATTRIBUTE, None) is not None and any(
        str(key).startswith(options.COMMAND) for key in obj.server_args
    ):
        from fastapi import HTTPException

        raise HTTPException(
            403,
            f"server_args key {options.COMMAND!r} is Canopy's own; documents are pinned and deleted "
            "at /canopy/chunks",
        )
    return await original(manager, obj, *args, **kwargs)


def _add_routes(server_args: Any, *_: Any, **__: Any) -> None:
    if getattr(server_args, options.ATTRIBUTE, None) is not None:
        from sglang_canopy.chunk.server import routes

        routes.add_routes(server_args)


def _on(scheduler: Any) -> bool:
    return getattr(scheduler.server_args, options.ATTRIBUTE, None) is not None


def _side() -> Any:
    from sglang_canopy.chunk.server import scheduler

    return scheduler


_SRT = "sglang.srt."
_COMMON = _SRT + "mem_cache.common."
_SCHEDULER = _SRT + "managers.scheduler.Scheduler."

HOOKS: tuple[tuple[str, str, Callable[..., Any], tuple[str, ...]], ...] = (
    (_SRT + "server_args.ServerArgs.add_cli_args", "after", options.add_flags, ("parser",)),
    (
        _SRT + "server_args.ServerArgs.from_cli_args",
        "before",
        options.note_options,
        ("cls", "args"),
    ),
    (_SRT + "server_args.ServerArgs.from_cli_args", "after", options.keep_options, ("cls", "args")),
    (_SRT + "entrypoints.http_server.launch_server", "before", _add_routes, ("server_args",)),
    (_SCHEDULER + "__init__", "around", _build, ("self", "server_args")),
    (_SCHEDULER + "_create_generation_req", "after", _request_created, ("self", "recv_req")),
    (_SCHEDULER + "get_prefill_adder_class", "after", _adder_class, ("self",)),
    (_SCHEDULER + "on_idle", "before", _idle, ("self",)),
    (_SCHEDULER + "flush_cache", "after", _flushed, ("self",)),
    (_SCHEDULER + "get_internal_state", "after", _tell, ("self", "recv_req")),
    (_SCHEDULER + "set_internal_state", "around", _command, ("self", "recv_req")),
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
        _insert_guard,
        ("self", "req"),
    ),
    (_COMMON + "checkpoint_kv_cache", "before", _publish_head, ("req", "tree_cache")),
    (_COMMON + "release_kv_cache", "before", _publish_head, ("req", "tree_cache")),
    (
        _SRT
        + "managers.scheduler_components.output_streamer.SchedulerOutputStreamer"
        + ".is_request_level_customized_info_key",
        "around",
        _request_level,
        ("self", "key"),
    ),
    (
        _SRT + "managers.tokenizer_control_mixin.TokenizerControlMixin.set_internal_state",
        "around",
        _internal_route,
        ("self", "obj"),
    ),
    (
        _SRT + "managers.tokenizer_manager.TokenizerManager.generate_request",
        "before",
        _prepare,
        ("self", "obj", "request"),
    ),
    (
        _SRT + "entrypoints.openai.serving_chat.OpenAIServingChat._convert_to_internal_request",
        "around",
        _convert_chat,
        ("self", "request", "raw_request"),
    ),
)
"""``(target, kind of hook, hook, leading parameters)``."""
