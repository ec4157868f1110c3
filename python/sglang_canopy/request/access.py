"""Keys, origins and sizes that Canopy's routes accept.

SGLang checks keys before a route runs, by the level of the route's endpoint (its
``srt/utils/auth.py``). Canopy has two kinds of routes:

- *reads* are open to a user's key, as SGLang's own are, and to the administrator's key;
- *changes* act on the state of other requests: if there is an administrator's key, they need it.
  A body must be JSON, and a browser may call them from a page of the same origin only: SGLang's
  CORS rules admit every origin.
"""

from __future__ import annotations

import functools
import hmac
import json
from collections.abc import Awaitable, Callable, Mapping
from typing import Any
from urllib.parse import urlsplit

from sglang_canopy.errors import CanopyError

Headers = Mapping[str, str]
RouteHandler = Callable[[Any], Awaitable[Any]]
"""Receives a Starlette request, returns JSON data or a response. Raises ``Refused`` or ``CanopyError``."""


class Refused(CanopyError):
    """A refused request. ``status``: of the response, instead of 400. ``retry_after_s``: whole seconds,
    sent as ``Retry-After``."""

    def __init__(self, status: int, reason: str, retry_after_s: int | None = None) -> None:
        super().__init__(reason)
        self.status, self.retry_after_s = status, retry_after_s


class BodyTooLong(CanopyError):
    """A body longer than the route's limit; the rest is not read."""


def is_same_secret(presented: str, secret: str | None) -> bool:
    """Compare in constant time. Returns false without a secret."""
    if not secret:
        return False
    return hmac.compare_digest(presented.encode(errors="surrogateescape"), secret.encode())


def has_admin_key(headers: Headers, admin_api_key: str | None) -> bool:
    """Return whether a request carries ``Authorization: Bearer ADMIN_API_KEY``."""
    scheme, _, key = headers.get("authorization", "").partition(" ")
    return scheme.lower() == "bearer" and is_same_secret(key, admin_api_key)


def add_read_route(
    app: Any, method: str, path: str, handler: RouteHandler, admin_api_key: str | None
) -> None:
    """Add a route that changes no state."""
    _add_route(
        app, method, path, handler, lambda headers: not has_admin_key(headers, admin_api_key)
    )


def add_change_route(
    app: Any,
    method: str,
    path: str,
    handler: RouteHandler,
    is_open_to_users: Callable[[Headers], bool] = lambda _headers: False,
) -> None:
    """Add a route that changes the state of other requests. ``is_open_to_users``: whether a user's key
    suffices for a request with these headers."""

    @functools.wraps(handler)
    async def check_and_handle(request: Any) -> Any:
        _check_origin(request.headers)
        _check_json(request.headers)
        return await handler(request)

    _add_route(app, method, path, check_and_handle, is_open_to_users)


def _check_origin(headers: Headers) -> None:
    """Raise ``Refused`` for a call that a browser makes for a page of another origin. Compares host and
    port: behind a gateway that ends TLS, the scheme differs."""
    origin = headers.get("origin")
    if origin is not None and urlsplit(origin).netloc.lower() != headers.get("host", "").lower():
        raise Refused(
            403,
            f"this route changes the server's state and was called from a page of {origin[:200]!r}; "
            "call it from a page of this server, or without a browser",
        )


def _check_json(headers: Headers) -> None:
    """Raise ``Refused`` unless the body is JSON, which browsers do not send across origins."""
    if headers.get("content-length", "0") == "0" and "transfer-encoding" not in headers:
        return
    content_type = headers.get("content-type", "")
    if content_type.partition(";")[0].strip().lower() != "application/json":
        raise Refused(
            415,
            f"the body must have the type application/json, got {content_type[:200]!r}; set Content-Type",
        )


async def read_json(request: Any, max_bytes: int, body_name: str) -> Any:
    """Return the body as JSON. Raises ``CanopyError`` if it exceeds ``max_bytes`` or is not JSON. The
    limit applies to received bytes, because Content-Length may be missing or wrong."""
    body = bytearray()
    async for part in request.stream():
        if len(body) + len(part) > max_bytes:
            raise BodyTooLong(f"{body_name} has at most {max_bytes} bytes; send less")
        body += part
    try:
        return json.loads(body)
    except (ValueError, RecursionError) as error:
        raise CanopyError(f"{body_name} is not JSON: {error}") from None


def _add_route(
    app: Any,
    method: str,
    path: str,
    handler: RouteHandler,
    is_user_level: Callable[[Headers], bool],
) -> None:
    """Add a route. ``is_user_level``: whether a request with these headers has the level of users."""
    from sglang.srt.utils.auth import AuthLevel, auth_level
    from starlette.datastructures import Headers as RequestHeaders
    from starlette.routing import Match, Route

    endpoint = _report_errors(handler)

    def with_level(level: AuthLevel) -> Callable[..., Any]:
        @functools.wraps(endpoint)
        async def answer(request: Any) -> Any:
            return await endpoint(request)

        return auth_level(level)(answer)

    user_endpoint = with_level(AuthLevel.NORMAL)
    admin_endpoint = with_level(AuthLevel.ADMIN_OPTIONAL)

    class LevelledRoute(Route):
        """A route with a level per request, which SGLang reads from the endpoint."""

        def matches(self, scope: Any) -> tuple[Any, Any]:
            match, child = super().matches(scope)
            if match is Match.FULL:
                is_user = is_user_level(RequestHeaders(scope=scope))
                child = {**child, "endpoint": user_endpoint if is_user else admin_endpoint}
            return match, child

    app.router.routes.append(LevelledRoute(path, admin_endpoint, methods=[method]))


def _report_errors(handler: RouteHandler) -> Callable[[Any], Awaitable[Any]]:
    """Return ``handler`` with its result as a response, and its errors as JSON with their status."""
    from starlette.requests import ClientDisconnect
    from starlette.responses import JSONResponse, Response

    @functools.wraps(handler)
    async def answer(request: Any) -> Any:
        try:
            result = await handler(request)
            return result if isinstance(result, Response) else JSONResponse(result)
        except ClientDisconnect:
            return Response(status_code=400)
        except ValueError as error:
            headers = {"Connection": "close"} if _is_unread(error, request) else {}
            if isinstance(error, Refused) and error.retry_after_s is not None:
                headers["Retry-After"] = str(error.retry_after_s)
            return JSONResponse(
                {"error": {"message": str(error)}},
                status_code=error.status if isinstance(error, Refused) else 400,
                headers=headers,
            )

    return answer


def _is_unread(error: ValueError, request: Any) -> bool:
    """Return whether part of a refused request's body was not read."""
    return isinstance(error, BodyTooLong | Refused) or "transfer-encoding" in request.headers
