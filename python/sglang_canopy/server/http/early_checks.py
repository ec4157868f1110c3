"""Check tenants and documents before a response starts, on routes that would report errors too late.

SGLang starts a stream with status 200 before the request reaches ``TokenizerManager``, and turns an
error of its Ollama routes into status 500.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from sglang_canopy.errors import CanopyError
from sglang_canopy.request.prompt import BODY_CHECKS
from sglang_canopy.request.sent import body_of, dropped_params, path_of
from sglang_canopy.server.http import entry


async def generate_begins(original: Callable[..., Any], obj: Any, request: Any) -> Any:
    """Hook around ``http_server.serve_generate_request``, the route ``/generate``."""
    if obj.stream:
        from sglang.srt.entrypoints import http_server

        try:
            _check(request, obj.sampling_params)
        except CanopyError as error:
            return http_server._create_error_response(error)
    return await original(obj, request)


async def response_begins(
    original: Callable[..., Any], self: Any, request: Any, raw_request: Any = None
) -> Any:
    """Hook around ``OpenAIServingResponses.create_responses``."""
    if raw_request is not None:
        try:
            if request.stream or request.background:
                _check(raw_request)
        except CanopyError as error:
            return self.create_error_response(str(error))
        raw_request.state.canopy_tool_parser = entry.tool_parser(self, request)
    return await original(self, request, raw_request)


async def ollama_begins(
    original: Callable[..., Any], self: Any, request: Any, raw_request: Any
) -> Any:
    """Hook around ``OllamaServing.handle_chat`` and ``handle_generate``."""
    try:
        _check(raw_request)
    except CanopyError as error:
        from starlette.responses import JSONResponse

        return JSONResponse({"error": str(error)}, status_code=400)
    return await original(self, request, raw_request)


def _check(request: Any, sampling_params: Any = None) -> None:
    """Raise ``CanopyError`` for a wrong tenant or wrong fields of documents. Modifies nothing."""
    body = body_of(request)
    tenant = {field: body.get(field) for field in ("extra_key", "cache_salt")}
    asked = SimpleNamespace(sampling_params=sampling_params, **tenant)
    entry.tenant_checked(asked, request)
    dropped_params(path_of(request), body)
    for check in BODY_CHECKS.values():
        check(body, asked)
