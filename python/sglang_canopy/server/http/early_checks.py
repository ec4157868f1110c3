"""One ASGI step before SGLang's routes: refuse what they would report too late, or not at all.

SGLang starts a stream with status 200 before the request reaches ``TokenizerManager``, and turns an
error of its Ollama routes into status 500. Its route ``/set_internal_state`` would send a client's
commands to the schedulers.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

from sglang_canopy.errors import CanopyError
from sglang_canopy.request.access import Refused
from sglang_canopy.request.prompt import BODY_CHECKS
from sglang_canopy.request.sent import body_of, read_dropped_params, request_path
from sglang_canopy.server.http import entry
from sglang_canopy.wire.messages import parse_kind

STATE_ROUTE, OLLAMA_ROUTES = "/set_internal_state", ("/api/chat", "/api/generate")
LATE_ROUTES = ("/generate", "/v1/responses", *OLLAMA_ROUTES)
"""Path suffixes of the routes that report errors too late, some in streams only."""
_STREAM_FIELDS = (b'"stream"', b'"background"')


def add_middleware(app: Any) -> None:
    """Add ``EarlyChecks`` to an application, behind its checks of keys."""
    from starlette.middleware import Middleware

    app.user_middleware.append(Middleware(EarlyChecks))


class EarlyChecks:
    """ASGI middleware. Checks the bodies of the routes above, and passes them on."""

    def __init__(self, app: Any) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http" and scope["path"].endswith((STATE_ROUTE, *LATE_ROUTES)):
            from starlette.requests import ClientDisconnect, Request
            from starlette.responses import JSONResponse

            request = Request(scope, receive)
            try:
                body = await request.body()
                receive = _replay_body(body, receive)
                _check_body(request, body)
            except ClientDisconnect:
                return
            except CanopyError as error:
                content = _format_error(request_path(request), str(error))
                status = error.status if isinstance(error, Refused) else 400
                await JSONResponse(content, status)(scope, receive, send)
                return
        await self._app(scope, receive, send)


def _replay_body(body: bytes, receive: Any) -> Any:
    """Return a channel that receives ``body`` first."""
    messages = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive_first() -> Any:
        return messages.pop() if messages else await receive()

    return receive_first


def _format_error(path: str, message: str) -> dict[str, Any]:
    """Return an error as SGLang's route writes it."""
    if path.endswith(OLLAMA_ROUTES):
        return {"error": message}
    if path.endswith("/v1/responses"):
        return {"object": "error", "message": message, "type": "BadRequestError", "code": 400}
    return {"error": {"message": message}}


def _check_body(request: Any, raw: bytes) -> None:
    """Raise ``CanopyError`` for a wrong tenant, wrong fields of documents, or a command of Canopy's."""
    path = request_path(request)
    if path.endswith(STATE_ROUTE):
        _check_state(body_of(request))
        return
    if not path.endswith(OLLAMA_ROUTES) and not any(field in raw for field in _STREAM_FIELDS):
        return  # not parsed twice
    body = body_of(request)
    tenant = {field: body.get(field) for field in ("extra_key", "cache_salt")}
    params = body.get("sampling_params") if path.endswith("/generate") else None
    request_fields = SimpleNamespace(sampling_params=params, **tenant)
    entry.write_tenant(request_fields, request)
    read_dropped_params(path, body)
    for check in BODY_CHECKS.values():
        check(body, request_fields)


def _check_state(body: Mapping[str, Any]) -> None:
    """Accept Canopy's commands from its own routes only, which authorise the sender and use no HTTP."""
    commands = body.get("server_args")
    if not isinstance(commands, Mapping):  # a body that only SGLang's parser reads, too
        raise CanopyError("server_args must be a JSON object")
    for key in commands:
        if kind := parse_kind(key):
            raise Refused(403, f"server_args key {kind.prefix!r} is Canopy's own; use {kind.route}")
