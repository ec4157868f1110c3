"""Every function of SGLang that chunk reuse hooks, for the plugin's table of seams.

The one place that decides whether chunk reuse is on and a request is concerned: what it calls does
not ask again. Light on purpose: the plugin imports this in every process, also where only
``--help`` is printed; what needs torch or SGLang is imported when a hook runs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from canopy_chunks.server import options


def options_of(server_args: Any) -> options.Options | None:
    """The chunk options of a server, or ``None`` where chunk reuse is off."""
    return getattr(server_args, options.ATTRIBUTE, None)


def engine_of(scheduler: Any) -> Any:
    """The ``ChunkEngine`` of a scheduler, or ``None`` where chunk reuse is off or still starting."""
    return _engine_of_runner(getattr(getattr(scheduler, "tp_worker", None), "model_runner", None))


def _engine_of_runner(runner: Any) -> Any:
    return getattr(runner, "canopy_chunks", None)


def _scheduler_side() -> Any:
    from canopy_chunks.server import scheduler

    return scheduler


def _build(original: Any, scheduler: Any, server_args: Any, *args: Any, **kwargs: Any) -> Any:
    on = options_of(server_args)
    if on is None:
        return original(scheduler, server_args, *args, **kwargs)
    return _scheduler_side().build(original, scheduler, server_args, on, *args, **kwargs)


def _pool_budget(original: Any, configurator: Any, budget_bytes: int, **kwargs: Any) -> Any:
    on = options_of(configurator.server_args)
    if on is None:
        return original(configurator, budget_bytes, **kwargs)
    return _scheduler_side().pool_budget(original, configurator, budget_bytes, on, **kwargs)


def _request_created(req: Any, scheduler: Any, *_: Any, **__: Any) -> None:
    if (engine := engine_of(scheduler)) is not None:
        _scheduler_side().request_created(engine, req)


def _adder_class(found: Any, scheduler: Any, *_: Any, **__: Any) -> Any:
    engine = engine_of(scheduler)
    if engine is None or not engine.options.fuses:
        return None
    made = _scheduler_side().prefill_adder_class(found)
    made.canopy_engine = engine
    return made


def _idle(scheduler: Any, *_: Any, **__: Any) -> None:
    if (engine := engine_of(scheduler)) is not None:
        _scheduler_side().encode_when_idle(engine, scheduler)


def _flushed(success: Any, scheduler: Any, *_: Any, **__: Any) -> None:
    if (engine := engine_of(scheduler)) is not None:
        _scheduler_side().flushed(engine, success)


def _internal_state(result: Any, scheduler: Any, *_: Any, **__: Any) -> None:
    if (engine := engine_of(scheduler)) is not None:
        _scheduler_side().add_internal_state(engine, result)


def run_commands(original: Any, scheduler: Any, recv_req: Any) -> Any:
    """Called by the one hook around ``Scheduler.set_internal_state``, ``server/arrivals.py``."""
    engine = engine_of(scheduler)
    if engine is None:
        return original(scheduler, recv_req)
    commands = [key for key in recv_req.server_args if key.startswith(options.COMMAND)]
    if not commands:
        return original(scheduler, recv_req)
    return _scheduler_side().run_commands(engine, commands)


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


def _check_insert(cache: Any, req: Any, *_: Any, up_to: int, **__: Any) -> None:
    if (request := getattr(req, "canopy_chunks", None)) is not None:
        _scheduler_side().check_insert(request, req, up_to)


def _publish(req: Any, tree_cache: Any, *_: Any, **__: Any) -> None:
    if (request := getattr(req, "canopy_chunks", None)) is not None:
        _scheduler_side().publish_exact_tokens(request, req, tree_cache)


def _request_level(original: Any, streamer: Any, key: str) -> bool:
    return key == "canopy_chunks" or original(streamer, key)


def _prepare(manager: Any, obj: Any, request: Any = None, *_: Any, **__: Any) -> None:
    if (on := options_of(manager.server_args)) is not None:
        from canopy_chunks.server.http import entry
        from sglang_canopy.config import server_options
        from sglang_canopy.request import owner

        carriers = server_options.options_of(manager.server_args).requests.carriers
        owner.settle(obj, request, carriers)  # documents are the tenant's, wherever it is named
        entry.prepare(manager, obj, on)


def _convert_chat(original: Any, serving: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
    on = options_of(serving.tokenizer_manager.server_args)
    if on is None:
        return original(serving, request, *args, **kwargs)
    from canopy_chunks.server.http import entry

    return entry.convert_chat(original, serving, request, on, *args, **kwargs)


def _add_routes(server_args: Any, *_: Any, **__: Any) -> None:
    if (on := options_of(server_args)) is not None:
        from canopy_chunks.server.http import routes, warm_up

        routes.add_routes(server_args, on)
        warm_up.register(on)


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
    (
        _SRT + "mem_cache.kv_cache_configurator.KVCacheConfigurator.config_from_budget",
        "around",
        _pool_budget,
        ("self", "budget_bytes"),
    ),
    (_SCHEDULER + "_create_generation_req", "after", _request_created, ("self", "recv_req")),
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
    (_COMMON + "checkpoint_kv_cache", "before", _publish, ("req", "tree_cache")),
    (_COMMON + "release_kv_cache", "before", _publish, ("req", "tree_cache")),
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
        _SRT + "entrypoints.openai.serving_chat.OpenAIServingChat._convert_to_internal_request",
        "around",
        _convert_chat,
        ("self", "request", "raw_request"),
    ),
)
"""``(target, kind of hook, hook, leading parameters)``."""
