"""Canopy's routes on a running app, and requests to them."""

import contextlib
import json
from collections.abc import Callable
from http.client import HTTPConnection
from types import SimpleNamespace
from typing import Any, NamedTuple

from sglang_canopy.request.client_hints import GATEWAY_HEADER
from sglang_canopy.server.scheduler.arrivals import receive_messages

USER_KEY, ADMIN_KEY = "a user's key", "the administrator's key"
SECRET = "0123456789abcdef-gateway"
HINT = {"conversation": "a", "over": True}


class RecordingManager:
    """The part of SGLang's tokenizer manager that the routes call. Records messages to schedulers."""

    def __init__(self) -> None:
        self.messages: list[dict[str, int]] = []
        self.scheduler: Any = None
        """SGLang's scheduler or a substitute, which receives the messages; ``None``: they are only recorded."""
        self.model_config = SimpleNamespace(vocab_size=1000, context_len=1000)

    def auto_create_handle_loop(self) -> None:
        pass

    async def set_internal_state_communicator(self, message: Any) -> list[Any]:
        self.messages.append(dict(message.server_args))
        if self.scheduler is not None:
            return [receive_messages(None, self.scheduler, message)]
        return [SimpleNamespace(updated=True)]

    async def set_internal_state(self, message: Any) -> list[bool]:
        return [answer.updated for answer in await self.set_internal_state_communicator(message)]

    async def get_internal_state(self) -> list[dict[str, Any]]:
        return [{}]


class HttpAnswer(NamedTuple):
    code: int
    text: str


class HttpClient:
    """A running app, and one request at a time to it."""

    def __init__(self, port: int, manager: RecordingManager) -> None:
        self.port, self.manager = port, manager

    def __call__(
        self, method: str, path: str, key: str | None = None, body: Any = None, **headers: str
    ) -> HttpAnswer:
        connection = HTTPConnection("127.0.0.1", self.port, timeout=30)
        sent_headers = {name.replace("_", "-"): value for name, value in headers.items()}
        if key is not None:
            sent_headers["Authorization"] = f"Bearer {key}"
        if body is not None and not isinstance(body, bytes) and not hasattr(body, "__next__"):
            body = json.dumps(body).encode()
        if body is not None:
            sent_headers.setdefault("Content-Type", "application/json")
        try:
            connection.request(method, path, body, sent_headers)
            answer = connection.getresponse()
            return HttpAnswer(answer.status, answer.read().decode())
        finally:
            connection.close()


Serve = Callable[..., contextlib.AbstractContextManager[HttpClient]]


def gateway(secret: str) -> dict[str, str]:
    return {GATEWAY_HEADER.replace("-", "_"): secret}
