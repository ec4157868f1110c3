"""Where a request enters the server: what the client said is checked, the rest inferred.

Runs in the HTTP process. The hooks around SGLang's request conversion call these functions;
a ``CanopyError`` is a ``ValueError``, which SGLang answers with status 400.
"""

from __future__ import annotations

import logging
import time
from typing import Any

from sglang_canopy import __version__
from sglang_canopy.errors import CanopyError
from sglang_canopy.hints import Waiting
from sglang_canopy.radix import status_file
from sglang_canopy.request import (
    MARKER_KEY,
    STAMP_KEY,
    infer_from_chat,
    make_stamp,
    said_by_client,
)
from sglang_canopy.reuse.ttft import TtftFit

logger = logging.getLogger(__name__)

MAX_HINT_BYTES = 4096

hints = Waiting()
"""Hints of ``POST /canopy/hint`` that wait for a request to carry them."""

_status_folder: Any = None
"""Where the schedulers show what they count; it goes when this process ends."""

ttft_fit = TtftFit()
"""TTFT ~ alpha * uncached tokens + beta over the requests this process served."""


def chat_converted(result: Any, self: Any, request: Any, *_: Any, **__: Any) -> None:
    """After ``OpenAIServingChat._convert_to_internal_request``."""
    adapted, _processed = result
    stamp(adapted, infer_from_chat(request))
    if getattr(request, "tools", None):
        marker = _tool_marker(self, request)
        if marker:
            adapted.sampling_params["custom_params"][MARKER_KEY] = marker


def completion_converted(result: Any, *_: Any, **__: Any) -> None:
    """After ``OpenAIServingCompletion._convert_to_internal_request``."""
    stamp(result[0], {"category": "completion"})


def generation_begins(original: Any, self: Any, obj: Any, *args: Any, **kwargs: Any) -> Any:
    """Around ``TokenizerManager.generate_request``: every route comes through here."""
    if hasattr(obj, "sampling_params"):
        stamp(obj, {"category": "generate"})
    return original(self, obj, *args, **kwargs)


def stamp(obj: Any, inferred: dict[str, Any]) -> None:
    """Check and stamp the sampling parameters of one request, or of a batch of them.

    A request that is stamped already (by the route it came through) is left as it is.
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
        said = said_by_client(custom)
        made = make_stamp(inferred, said, time.monotonic())
        line = ttft_fit.line()
        if line is not None:
            made["alpha"], made["beta"] = line
        carried = hints.take()
        if carried is not None:
            made["hints"] = carried
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


def add_routes(server_args: Any, *_: Any, **__: Any) -> None:
    """Before ``launch_server``: Canopy's own two routes, beside SGLang's."""
    from fastapi import Request
    from fastapi.responses import JSONResponse
    from sglang.srt.entrypoints.http_server import app

    global _status_folder
    _status_folder = status_file.make_folder()
    started = time.monotonic()

    async def hint(request: Request) -> JSONResponse:
        try:
            if int(request.headers.get("content-length", 0)) > MAX_HINT_BYTES:
                raise CanopyError(f"a hint has at most {MAX_HINT_BYTES} bytes")
            hints.add(await request.json(), time.monotonic())
        except ValueError as error:
            reason = str(error) if isinstance(error, CanopyError) else f"not JSON: {error}"
            return JSONResponse({"error": {"message": reason}}, status_code=400)
        return JSONResponse({"waiting": len(hints)})

    async def status() -> dict[str, Any]:
        return {
            "version": __version__,
            "policy": server_args.radix_eviction_policy,
            "policy_config": server_args.radix_eviction_policy_config or {},
            "ttft_model": ttft_fit.stats(),
            "hints_waiting": len(hints),
            "uptime_s": time.monotonic() - started,
            "ranks": status_file.read_all(),
        }

    hint.__annotations__["request"] = Request
    app.add_api_route("/canopy/hint", hint, methods=["POST"])
    app.add_api_route("/canopy/status", status, methods=["GET"])


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
