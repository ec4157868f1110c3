"""One task of an agent, for the cache: its requests, its pauses, its end.

    with Session("http://127.0.0.1:30000"):
        run_the_agent()

Every request of the block through an HTTP client of ``clients/http.py`` names its conversation.
After an answer that calls tools, a hint announces the time of the next request, if pauses of these
tools are known. The end of the block sends the hint that the conversation is over. Hints are sent
in the background, and a server that rejects them does not affect the agent.

A server with ``--api-key`` requires a key with each hint. In order of precedence:
``Session(headers=...)``, the environment variables ``CANOPY_API_KEY`` and
``CANOPY_GATEWAY_SECRET``, and the key of the agent's own requests to the same server.
"""

from __future__ import annotations

import json
import logging
import os
import time
import urllib.request
import uuid
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import ContextVar
from typing import Any
from urllib.parse import urlsplit

from sglang_canopy.clients.tool_times import TOOL_TIMES, ToolTimes

TIMEOUT_S = 5.0
_CURRENT: ContextVar[Session | None] = ContextVar("sglang_canopy_session", default=None)
_SENDER = ThreadPoolExecutor(max_workers=1, thread_name_prefix="canopy-hints")
"""One thread, so that a session's hints arrive in order."""
_log = logging.getLogger(__name__)


class Session:
    """A conversation with the server at ``url`` (without ``/v1``).

    ``name`` is random by default. Each hint carries ``headers``, for example ``{"Authorization":
    "Bearer KEY"}``, and ``tenant``'s ``cache_salt`` and ``extra_key``, which must equal the
    requests'. A session inside another session is a sub-agent's: the outer session waits.
    """

    def __init__(
        self,
        url: str,
        name: str | None = None,
        *,
        headers: Mapping[str, str] | None = None,
        tenant: Mapping[str, str] | None = None,
        tool_times: ToolTimes = TOOL_TIMES,
    ) -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        self.name = name or f"session-{uuid.uuid4()}"
        self.parent: str | None = None
        self._headers = {**_headers_of_environment(), **_lower(headers or {})}
        self._tenant = dict(tenant or {})
        self._tool_times = tool_times
        self._tools: tuple[str, ...] = ()
        self._answered_at = 0.0
        self._outer: Session | None = None
        self._last: Future[None] | None = None

    def __enter__(self) -> Session:
        return self.enter()

    def __exit__(self, *error: object) -> None:
        self.leave()
        self.over()

    def enter(self) -> Session:
        """Assign this thread's or task's requests to this session; an outer session waits."""
        outer = self._outer = _CURRENT.get()
        self.parent = outer.name if outer is not None and outer is not self else None
        _CURRENT.set(self)
        return self

    def leave(self) -> None:
        """Undo ``enter``. The conversation may continue later."""
        _CURRENT.set(self._outer)

    def fields(self) -> dict[str, Any]:
        """Return ``custom_params`` of the next request, which is about to be sent."""
        if self._tools:
            self._tool_times.took(self._tools, time.monotonic() - self._answered_at)
            self._tools = ()
        fields: dict[str, Any] = {"canopy_conversation": self.name}
        if self.parent is not None:
            fields["canopy_parent"] = self.parent
        return fields

    def answered(self, tools: Sequence[str]) -> None:
        """Record a complete answer that calls ``tools``; without tools no hint is sent."""
        self._tools, self._answered_at = tuple(tools), time.monotonic()
        expected_s = self._tool_times.expected_s(tools)
        if expected_s is not None:
            self._hint(return_in_s=expected_s)

    def use_key_of(self, url: str, authorization: str | None) -> None:
        """Send ``authorization`` with hints if ``url`` is on the session's server and the session
        has no key. The key is sent to no other server."""
        if authorization and _origin(url) == _origin(self.url):
            self._headers.setdefault("authorization", authorization)

    def over(self) -> None:
        """End the task: no request continues this conversation."""
        self._hint(over=True)

    def wait(self) -> None:
        """Wait until all hints so far are sent or rejected."""
        if self._last is not None:
            self._last.result()

    def _hint(self, **fields: Any) -> None:
        body = {**self._tenant, "conversation": self.name, **fields}
        self._last = _SENDER.submit(_post, f"{self.url}/canopy/hint", body, dict(self._headers))


def current() -> Session | None:
    """Return the session of the current block, in this thread or task."""
    return _CURRENT.get()


def _headers_of_environment() -> dict[str, str]:
    key, secret = map(os.environ.get, ("CANOPY_API_KEY", "CANOPY_GATEWAY_SECRET"))
    given = {"authorization": key and f"Bearer {key}", "x-canopy-gateway-secret": secret}
    return {name: value for name, value in given.items() if value}


def _lower(headers: Mapping[str, str]) -> dict[str, str]:
    return {name.lower(): value for name, value in headers.items()}


def _origin(url: str) -> tuple[str, str | None, int | None]:
    parts = urlsplit(url)
    return parts.scheme, parts.hostname, parts.port or {"http": 80, "https": 443}.get(parts.scheme)


def _post(url: str, body: Mapping[str, Any], headers: Mapping[str, str]) -> None:
    request = urllib.request.Request(
        url, json.dumps(body).encode(), {"Content-Type": "application/json", **headers}
    )
    try:
        urllib.request.urlopen(request, timeout=TIMEOUT_S).close()
    except (OSError, ValueError) as error:
        _log.warning("%s did not take a hint: %s", url, error)
