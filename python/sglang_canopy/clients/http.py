"""HTTP clients that send a session's hints, for every library that accepts an ``httpx`` client.

    OpenAI(base_url=URL, api_key=KEY, http_client=http_client())
    ChatOpenAI(base_url=URL, ..., http_client=http_client(), http_async_client=async_http_client())
    OpenAIChatCompletionsModel(MODEL, AsyncOpenAI(..., http_client=async_http_client()))
    litellm.client_session, litellm.aclient_session = http_client(), async_http_client()

Inside ``with Session(URL)`` the body of a completion gets the session's ``custom_params`` in
addition to its own, and the tools that the answer calls are recorded, streamed or not. Outside a
session requests are unchanged.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator, Mapping
from typing import Any

import httpx

from sglang_canopy.clients.called import MAX_BYTES, tools_called
from sglang_canopy.clients.session import Session, current

_ROUTES = ("/chat/completions", "/completions")


def http_client(**options: Any) -> httpx.Client:
    """Return an ``httpx.Client``; ``options`` are its own."""
    inner = options.pop("transport", None) or httpx.HTTPTransport()
    options.setdefault("timeout", None)
    return httpx.Client(transport=HintTransport(inner), **options)


def async_http_client(**options: Any) -> httpx.AsyncClient:
    """Return an ``httpx.AsyncClient``; ``options`` are its own."""
    inner = options.pop("transport", None) or httpx.AsyncHTTPTransport()
    options.setdefault("timeout", None)
    return httpx.AsyncClient(transport=AsyncHintTransport(inner), **options)


class HintTransport(httpx.BaseTransport):
    """Wraps ``inner`` and adds the current session's fields to requests."""

    def __init__(self, inner: httpx.BaseTransport) -> None:
        self.inner = inner

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        session = _session_for(request)
        if session is None:
            return self.inner.handle_request(request)
        request.read()
        response = self.inner.handle_request(_with_fields(request, session))
        response.stream = _Watched(response, session)
        return response

    def close(self) -> None:
        self.inner.close()


class AsyncHintTransport(httpx.AsyncBaseTransport):
    """``HintTransport`` for asynchronous clients."""

    def __init__(self, inner: httpx.AsyncBaseTransport) -> None:
        self.inner = inner

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        session = _session_for(request)
        if session is None:
            return await self.inner.handle_async_request(request)
        await request.aread()
        response = await self.inner.handle_async_request(_with_fields(request, session))
        response.stream = _AsyncWatched(response, session)
        return response

    async def aclose(self) -> None:
        await self.inner.aclose()


class _Answer:
    """Collects an answer's bytes; at the end the session receives the tools that it calls."""

    def __init__(self, response: httpx.Response, session: Session) -> None:
        self.inner: Any = response.stream
        self._session: Session | None = session
        self._readable = response.is_success and "content-encoding" not in response.headers
        self._bytes = bytearray()

    def take(self, chunk: bytes) -> bytes:
        if len(self._bytes) < MAX_BYTES:
            self._bytes += chunk
        return chunk

    def ended(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            session.answered(tools_called(bytes(self._bytes)) if self._readable else ())


class _Watched(_Answer, httpx.SyncByteStream):
    def __iter__(self) -> Iterator[bytes]:
        for chunk in self.inner:
            yield self.take(chunk)
        self.ended()

    def close(self) -> None:
        self.inner.close()
        self.ended()


class _AsyncWatched(_Answer, httpx.AsyncByteStream):
    async def __aiter__(self) -> AsyncIterator[bytes]:
        async for chunk in self.inner:
            yield self.take(chunk)
        self.ended()

    async def aclose(self) -> None:
        await self.inner.aclose()
        self.ended()


def _session_for(request: httpx.Request) -> Session | None:
    completes = request.method == "POST" and request.url.path.endswith(_ROUTES)
    return current() if completes else None


def _with_fields(request: httpx.Request, session: Session) -> httpx.Request:
    """Return the request with the session's fields; fields set by the client take precedence."""
    try:
        body = json.loads(request.content)
    except ValueError:
        return request
    given = body.get("custom_params") or {} if isinstance(body, dict) else None
    if not isinstance(given, Mapping):
        return request  # the server reports the error
    body["custom_params"] = {**session.fields(), **given}
    session.use_key_of(str(request.url), request.headers.get("authorization"))
    headers = [(k, v) for k, v in request.headers.raw if k.lower() != b"content-length"]
    content = json.dumps(body).encode()
    return httpx.Request(
        request.method, request.url, headers=headers, content=content, extensions=request.extensions
    )
