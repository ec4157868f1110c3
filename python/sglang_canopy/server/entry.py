"""Where a request enters the server: what the client said is checked, the rest inferred.

Runs in the HTTP process. The hooks around SGLang's request conversion call these functions;
a ``CanopyError`` is a ``ValueError``, which SGLang answers with status 400.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping
from typing import Any

from sglang_canopy import __version__
from sglang_canopy.request import access, client_hints
from sglang_canopy.request.fields import (
    MARKER_KEY,
    STAMP_KEY,
    infer_from_chat,
    make_stamp,
    said_by_client,
)
from sglang_canopy.request.hints import KEY, TooManyHints, Waiting, deliver, unpack
from sglang_canopy.reuse.ttft import TtftFit
from sglang_canopy.server.access_log import hide_queries
from sglang_canopy.telemetry import status_file
from sglang_canopy.tenant import new_shown_key

logger = logging.getLogger(__name__)

MAX_HINT_BYTES = 4096

hints = Waiting()
"""Hints of ``POST /canopy/hint`` that wait to be sent to the schedulers."""

hint_rule = client_hints.ClientHints()
"""Whose hints are heeded; ``add_routes`` sets what the server was started with."""

_delivery: asyncio.Task[None] | None = None

_status_folder: Any = None
"""Where the schedulers show what they count; it goes when this process ends."""

ttft_fit = TtftFit()
"""TTFT ~ alpha * uncached tokens + beta over the requests this process served."""


def chat_converted(
    result: Any, self: Any, request: Any, raw_request: Any = None, *_: Any, **__: Any
) -> None:
    """After ``OpenAIServingChat._convert_to_internal_request``."""
    adapted, _processed = result
    stamp(adapted, infer_from_chat(request), _headers(raw_request))
    if getattr(request, "tools", None):
        marker = _tool_marker(self, request)
        if marker:
            adapted.sampling_params["custom_params"][MARKER_KEY] = marker


def completion_converted(
    result: Any, _self: Any, _request: Any, raw_request: Any = None, *_: Any, **__: Any
) -> None:
    """After ``OpenAIServingCompletion._convert_to_internal_request``."""
    stamp(result[0], {"category": "completion"}, _headers(raw_request))


def generation_begins(
    original: Any, self: Any, obj: Any, request: Any = None, *args: Any, **kwargs: Any
) -> Any:
    """Around ``TokenizerManager.generate_request``: every route comes through here."""
    if hasattr(obj, "sampling_params"):
        stamp(obj, {"category": "generate"}, _headers(request))
    return original(self, obj, request, *args, **kwargs)


def stamp(obj: Any, inferred: dict[str, Any], headers: Mapping[str, str] | None = None) -> None:
    """Check and stamp the sampling parameters of one request, or of a batch of them.

    A request that is stamped already (by the route it came through) is left as it is. Hints
    that ``headers`` do not entitle to are left out.
    """
    if getattr(obj, "canopy_stamped", False):
        return
    obj.canopy_stamped = True
    if obj.sampling_params is None:
        obj.sampling_params = {}
    params = obj.sampling_params
    for one in params if isinstance(params, list) else [params]:
        if not isinstance(one, dict):
            continue
        custom = one.get("custom_params")
        said = hint_rule.allowed(said_by_client(custom), headers)
        made = make_stamp(inferred, said, time.monotonic())
        line = ttft_fit.line()
        if line is not None:
            made["alpha"], made["beta"] = line
        one["custom_params"] = {**(custom or {}), STAMP_KEY: made}


def first_token(result: Any, state: Any, recv_obj: Any, i: int) -> None:
    """After ``TokenizerManager._get_scheduler_first_token_time``, once a request.

    Feeds the TTFT line with the request's prefill time in the scheduler, queueing left out.
    """
    if recv_obj.time_stats is None:
        return
    times = recv_obj.time_stats[i]
    seconds = times.prefill_finished_time - times.forward_entry_time
    if times.forward_entry_time > 0.0 and seconds > 0.0:
        ttft_fit.add(recv_obj.prompt_tokens[i] - recv_obj.cached_tokens[i], seconds)


def hints_arrive(original: Any, scheduler: Any, recv_req: Any) -> Any:
    """Around ``Scheduler.set_internal_state``: hints that ``deliver`` sent."""
    packed = [key for key in recv_req.server_args if key.startswith(KEY)]
    if not packed:
        return original(scheduler, recv_req)
    from sglang.srt.managers.io_struct import SetInternalStateReqOutput

    from sglang_canopy.radix.core import CanopyTreeCore

    core = getattr(scheduler.tree_cache, "tree_core", None)
    heeded = isinstance(core, CanopyTreeCore)
    if heeded:
        for key in packed:
            for hint in unpack(key):
                core.hint(hint)
    return SetInternalStateReqOutput(updated=heeded)


async def internal_state_asked(
    original: Any, manager: Any, obj: Any, *args: Any, **kwargs: Any
) -> Any:
    """Around ``TokenizerControlMixin.set_internal_state``, which is a route of SGLang's as well:
    hints come by ``/canopy/hint`` alone, which looks at who gives them."""
    if any(str(key).startswith(KEY) for key in obj.server_args):
        from fastapi import HTTPException

        raise HTTPException(403, f"server_args key {KEY!r} is Canopy's own; use /canopy/hint")
    return await original(manager, obj, *args, **kwargs)


def add_routes(server_args: Any, *_: Any, **__: Any) -> None:
    """Before ``launch_server``: Canopy's own two routes, beside SGLang's."""
    from sglang.srt.entrypoints.http_server import app

    global _status_folder, hint_rule
    _status_folder = status_file.make_folder()
    new_shown_key()
    hide_queries()
    hint_rule = client_hints.rule_of(server_args)
    started = time.monotonic()

    async def status(_request: Any) -> dict[str, Any]:
        return {
            "version": __version__,
            "policy": server_args.radix_eviction_policy,
            "policy_config": server_args.radix_eviction_policy_config or {},
            "ttft_model": ttft_fit.stats(),
            "client_hints": hint_rule.mode,
            "hints_waiting": len(hints),
            "uptime_s": time.monotonic() - started,
            "ranks": status_file.read_all(),
        }

    access.add_change_route(app, "POST", "/canopy/hint", _hint, hint_rule.from_gateway)
    access.add_read_route(app, "GET", "/canopy/status", status, server_args.admin_api_key)


async def _hint(request: Any) -> dict[str, Any]:
    """``POST /canopy/hint``: take one hint and see that it is sent."""
    if not hint_rule.heeded(request.headers):
        raise access.Refused(
            403,
            f"this server runs with {client_hints.FLAG} {hint_rule.mode}: hints are taken "
            + ("from nobody" if hint_rule.mode == client_hints.OFF else _FROM_WHOM),
        )
    body = await access.read_json(request, MAX_HINT_BYTES, "a hint")
    try:
        hints.add(body, time.monotonic())
    except TooManyHints as error:
        raise access.Refused(429, str(error)) from None
    _see_to_delivery()
    return {"waiting": len(hints)}


_FROM_WHOM = (
    "with the administrator's key, or from a gateway that sends its secret as "
    + client_hints.GATEWAY_HEADER
)


def _see_to_delivery() -> None:
    """Send waiting hints, now or behind those that are under way. Runs in the event loop."""
    global _delivery
    if _delivery is None or _delivery.done():
        _delivery = asyncio.get_running_loop().create_task(_deliver())


async def _deliver() -> None:
    from sglang.srt.entrypoints import http_server
    from sglang.srt.managers.io_struct import SetInternalStateReq

    manager = http_server._global_state.tokenizer_manager
    manager.auto_create_handle_loop()

    async def send(key: str) -> None:
        await manager.set_internal_state_communicator(SetInternalStateReq(server_args={key: 1}))

    try:
        await deliver(hints, send)
    except Exception:
        logger.exception("canopy: hints could not be sent; they go with the next one")


def _headers(request: Any) -> Mapping[str, str] | None:
    """The headers of an HTTP request; ``None`` for a call from inside the process."""
    return getattr(request, "headers", None)


def _tool_marker(serving: Any, request: Any) -> list[int]:
    """Token ids with which the model opens a tool call, if its parser has such a marker."""
    parser = getattr(serving, "tool_call_parser", None)
    tokenizer = serving.tokenizer_manager.tokenizer
    if not parser or tokenizer is None:
        return []
    from sglang.srt.function_call.function_call_parser import FunctionCallParser

    detector = FunctionCallParser(request.tools, parser).detector
    text = (getattr(detector, "bot_token", "") or "").strip()
    return tokenizer.encode(text, add_special_tokens=False) if text else []
