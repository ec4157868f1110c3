"""One task of an agent is one conversation: name it, announce its pauses and its end.

    client = OpenAI(base_url=f"{URL}/v1", api_key=KEY, http_client=httpx.Client(transport=Hints()))
    with Session(URL):
        run_the_agent(client)

``Hints`` and ``AsyncHints`` wrap an ``httpx`` transport, so every library that accepts an ``httpx``
client works (OpenAI, LangChain, the Agents SDK, LiteLLM). Requests inside a session name its
conversation. After an answer that calls tools,
a hint announces the next request, if the pause after these tools is known. Copy this file and change it.

A server with ``--api-key`` requires a key with each hint. In order of precedence: ``Session(headers=...)``,
the environment variables ``CANOPY_API_KEY`` and ``CANOPY_GATEWAY_SECRET``, and the key of the agent's own
requests to the same server.
"""

from __future__ import annotations

import json
import logging
import os
import re
import statistics
import time
import urllib.request
import uuid
from collections import defaultdict, deque
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import ContextVar
from typing import Any

import httpx

current_session: ContextVar[Session | None] = ContextVar("canopy_session", default=None)
hint_sender = ThreadPoolExecutor(max_workers=1)  # one thread: hints arrive in order
pauses_by_tool: dict[str, deque[float]] = defaultdict(lambda: deque(maxlen=8))  # seconds, by tool


class Session:
    """``url`` is the server without ``/v1``; ``tenant`` has the requests' ``cache_salt`` and ``extra_key``."""

    def __init__(
        self,
        url: str,
        name: str | None = None,
        *,
        headers: dict[str, str] | None = None,
        tenant: dict[str, str] | None = None,
    ) -> None:
        key, secret = map(os.environ.get, ("CANOPY_API_KEY", "CANOPY_GATEWAY_SECRET"))
        sent_headers = {"authorization": key and f"Bearer {key}", "x-canopy-gateway-secret": secret}
        sent_headers |= {name.lower(): value for name, value in (headers or {}).items()}
        self.headers = {name: value for name, value in sent_headers.items() if value}
        self.url, self.tenant = url.rstrip("/").removesuffix("/v1"), tenant or {}
        self.name = name or f"session-{uuid.uuid4()}"
        self.tools: set[str] = set()
        self.answered_s = 0.0
        self.last_hint: Future[None] | None = None

    def __enter__(self) -> Session:
        self.outer_session = current_session.get()
        current_session.set(self)
        return self

    def __exit__(self, *error: object) -> None:
        current_session.set(self.outer_session)
        self.send_hint(over=True)

    def send_hint(self, **fields: Any) -> None:
        """Send a hint in the background; a server that rejects it does not affect the agent."""
        body = json.dumps({**self.tenant, "conversation": self.name, **fields}).encode()
        headers = {"Content-Type": "application/json", **self.headers}
        request = urllib.request.Request(f"{self.url}/canopy/hint", body, headers)
        self.last_hint = hint_sender.submit(post_hint, request)

    def add_fields(self, request: httpx.Request) -> httpx.Request:
        """Return ``request`` with this conversation's fields; the client's own take precedence."""
        for tool in self.tools:
            pauses_by_tool[tool].append(time.monotonic() - self.answered_s)
        self.tools = set()
        server, requested = httpx.URL(self.url), request.url
        key = request.headers.get("authorization")
        if key and (server.scheme, server.host, server.port) == (
            requested.scheme,
            requested.host,
            requested.port,
        ):
            self.headers.setdefault("authorization", key)
        body = json.loads(request.content)
        fields = {"canopy_conversation": self.name}
        body["custom_params"] = {**fields, **(body.get("custom_params") or {})}
        headers = {k: v for k, v in request.headers.items() if k != "content-length"}
        options = {"headers": headers, "extensions": request.extensions}
        return httpx.Request(request.method, request.url, content=json.dumps(body), **options)

    def read_answer(self, answer: bytes) -> None:
        """Read the tools that a chat completion calls, streamed or whole, and announce the pause."""
        names = re.findall(rb'"function":\s*\{[^{}]*?"name":\s*"([^"]+)"', answer)
        self.tools, self.answered_s = {name.decode() for name in names}, time.monotonic()
        if self.tools and all(pauses_by_tool.get(tool) for tool in self.tools):
            expected_s = max(statistics.median(pauses_by_tool[tool]) for tool in self.tools)
            self.send_hint(return_in_s=expected_s)


def post_hint(request: urllib.request.Request) -> None:
    try:
        urllib.request.urlopen(request, timeout=5).close()
    except (OSError, ValueError) as error:
        logging.getLogger(__name__).warning("%s rejected a hint: %s", request.full_url, error)


def session_of(request: httpx.Request) -> Session | None:
    return current_session.get() if request.url.path.endswith("/completions") else None


class AnswerStream(httpx.SyncByteStream, httpx.AsyncByteStream):
    """Passes an answer on; at its end the session reads it."""

    def __init__(self, inner: Any, session: Session) -> None:
        self.inner, self.session, self.received = inner, session, bytearray()

    def pass_on(self, part: bytes) -> bytes:
        self.received += part
        return part

    def finish(self) -> None:
        session, self.session = self.session, None
        if session is not None:
            session.read_answer(bytes(self.received))

    def __iter__(self) -> Any:
        yield from map(self.pass_on, self.inner)
        self.finish()

    async def __aiter__(self) -> Any:
        async for part in self.inner:
            yield self.pass_on(part)
        self.finish()

    def close(self) -> None:
        self.inner.close()
        self.finish()

    async def aclose(self) -> None:
        await self.inner.aclose()
        self.finish()


class Hints(httpx.HTTPTransport):
    def handle_request(self, request: httpx.Request) -> httpx.Response:
        session = session_of(request)
        if session is None:
            return super().handle_request(request)
        request.read()
        response = super().handle_request(session.add_fields(request))
        response.stream = AnswerStream(response.stream, session)
        return response


class AsyncHints(httpx.AsyncHTTPTransport):
    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        session = session_of(request)
        if session is None:
            return await super().handle_async_request(request)
        await request.aread()
        response = await super().handle_async_request(session.add_fields(request))
        response.stream = AnswerStream(response.stream, session)
        return response
