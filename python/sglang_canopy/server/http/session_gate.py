"""The session gate in the HTTP process: status 429 with Retry-After, and time messages to schedulers.

A scheduler refuses a request with SGLang's abort message. SGLang returns the status in that message
without headers, or, for streams, status 200 and an error in the stream. ``Refusals`` adds the header, and
returns status 429 for streams refused before their first token.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from http import HTTPStatus
from typing import Any

from sglang_canopy.wire.messages import RETRY_AFTER, TIME, send

logger = logging.getLogger(__name__)

TICK_S = 1.0
"""Seconds between time messages to the schedulers while requests are running."""

Send = Callable[[dict[str, Any]], Awaitable[None]]
_refusal: ContextVar[dict[str, Any] | None] = ContextVar("canopy_refusal", default=None)
"""Refusal of this task's HTTP request; empty if it was not refused."""


def request_aborted(_manager: Any, out: dict[str, Any], *_: Any, **__: Any) -> None:
    """Hook before ``TokenizerManager._handle_abort_finish_reason``: record a refusal by the gate."""
    reason = out["meta_info"]["finish_reason"]
    answer = _refusal.get()
    if answer is not None and isinstance(reason, dict) and RETRY_AFTER in reason:
        answer |= reason


class Refusals:
    """ASGI middleware that returns refusals by the gate with status 429 and Retry-After."""

    def __init__(self, app: Any) -> None:
        self.app = app

    async def __call__(self, scope: Any, receive: Any, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        refusal: dict[str, Any] = {}
        token = _refusal.set(refusal)
        try:
            await self.app(scope, receive, _Answer(refusal, send))
        finally:
            _refusal.reset(token)


class _Answer:
    """One HTTP response. Its head is held until the first part of the body, because a refusal is known
    only then."""

    def __init__(self, refusal: dict[str, Any], send: Send) -> None:
        self.refusal = refusal
        self.send = send
        self.head: dict[str, Any] | None = None
        self.replaced = False

    async def __call__(self, message: dict[str, Any]) -> None:
        if self.replaced:
            return
        if message["type"] == "http.response.start":
            self.head = message
            return
        if self.head is not None:
            head, self.head = self.head, None
            if self.refusal:
                if head["status"] != HTTPStatus.TOO_MANY_REQUESTS:
                    self.replaced = True
                    await self._refuse()
                    return
                head = {**head, "headers": [*head["headers"], self._retry_after()]}
            await self.send(head)
        await self.send(message)

    def _retry_after(self) -> tuple[bytes, bytes]:
        return b"retry-after", str(self.refusal[RETRY_AFTER]).encode()

    async def _refuse(self) -> None:
        status = HTTPStatus.TOO_MANY_REQUESTS
        body = {
            "object": "error",
            "message": self.refusal["message"],
            "type": str(status.value),
            "param": None,
            "code": status.value,
        }
        raw = json.dumps(body).encode()
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(raw)).encode()),
            self._retry_after(),
        ]
        start = {"type": "http.response.start", "status": status.value, "headers": headers}
        await self.send(start)
        await self.send({"type": "http.response.body", "body": raw})


_ticking: asyncio.Task[None] | None = None


def start_ticker(manager: Any) -> None:
    """Send the time to the schedulers once a second while ``manager`` (SGLang's tokenizer manager) has
    running requests. Call it in its event loop for each request."""
    global _ticking
    if _ticking is None or _ticking.done() or _ticking.get_loop() is not asyncio.get_running_loop():
        _ticking = asyncio.get_running_loop().create_task(_tell_time(manager))


async def _tell_time(manager: Any) -> None:
    is_busy = True
    while is_busy:
        await asyncio.sleep(TICK_S)
        is_busy = bool(manager.rid_to_state)
        try:
            await send(manager, TIME, repr(time.monotonic()))
        except Exception:
            logger.exception("canopy: the time could not be sent to the schedulers")
