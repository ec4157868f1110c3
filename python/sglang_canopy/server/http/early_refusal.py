"""Answer refused requests with 429 and ``Retry-After``, on every route, streams included.

SGLang begins a stream with status 200 before the scheduler has received the request. A stream's
head is therefore held until its first answer. Other answers get the header.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextvars import ContextVar
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

from sglang_canopy.request.early_refusal import retry_after_s

_STREAMS = (b"text/event-stream", b"application/x-ndjson")


@dataclass(slots=True)
class _Progress:
    """State of one HTTP request."""

    answered: bool = False
    refused: str | None = None
    """The refusal's text."""


_progress: ContextVar[_Progress | None] = ContextVar("canopy_progress", default=None)


async def watched(answers: AsyncIterator[Any]) -> AsyncIterator[Any]:
    """Yield ``answers`` of ``TokenizerManager.generate_request``, and record a refusal."""
    from fastapi import HTTPException

    progress = _progress.get() or _Progress()
    try:
        async for answer in answers:
            reason = _refusal(answer)
            if reason is None:
                progress.answered = True
            elif not progress.answered:
                progress.refused = reason
            yield answer
    except HTTPException as error:
        if error.status_code == HTTPStatus.TOO_MANY_REQUESTS:
            progress.refused = str(error.detail)
            error.headers = {"Retry-After": str(retry_after_s(progress.refused))}
        raise


def _refusal(answer: Any) -> str | None:
    """Return the text of an answer that is a refusal."""
    info = answer.get("meta_info") if isinstance(answer, dict) else None
    reason = (info or {}).get("finish_reason")
    if not isinstance(reason, dict) or reason.get("status_code") != HTTPStatus.TOO_MANY_REQUESTS:
        return None
    return str(reason["message"])


class EarlyRefusals:
    """ASGI middleware. ``respond``: makes the answer to a request from an ``HTTPException``."""

    def __init__(self, app: Any, respond: Callable[..., Any]) -> None:
        self._app = app
        self._respond = respond

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http" or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        progress, held = _Progress(), list[Any]()
        started = refused = False

        async def refuse() -> None:
            nonlocal refused
            refused = True
            response = await self._respond(scope, receive, progress.refused)
            await response(scope, receive, send)

        async def pass_on(message: Any) -> None:
            nonlocal started
            if refused:
                return
            if not started:
                if progress.refused is not None:
                    held.clear()
                    await refuse()
                    return
                if message["type"] == "http.response.start" and _is_stream(message):
                    held.append(message)
                    return
                if held and not progress.answered and message.get("more_body"):
                    held.append(message)
                    return
                started = True
                for one in held:
                    await send(one)
                held.clear()
            await send(message)

        token = _progress.set(progress)
        try:
            await self._app(scope, receive, pass_on)
        finally:
            _progress.reset(token)
        if progress.refused is not None and not (started or refused):
            await refuse()


def _is_stream(message: Any) -> bool:
    kinds = [value for name, value in message["headers"] if name.lower() == b"content-type"]
    return any(kind.startswith(_STREAMS) for kind in kinds)


def add(app: Any) -> None:
    """Add the middleware to SGLang's application, before it serves."""
    from fastapi import HTTPException
    from starlette.requests import Request

    async def respond(scope: Any, receive: Any, reason: str) -> Any:
        handler = app.exception_handlers[HTTPException]
        status = HTTPStatus.TOO_MANY_REQUESTS.value
        response = await handler(Request(scope, receive), HTTPException(status, reason))
        response.headers["Retry-After"] = str(retry_after_s(reason))
        return response

    app.add_middleware(EarlyRefusals, respond=respond)
