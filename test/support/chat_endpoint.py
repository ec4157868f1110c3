"""An OpenAI API without a model: it answers from a list and records the requests."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

USAGE = {
    "prompt_tokens": 10,
    "completion_tokens": 1,
    "total_tokens": 11,
    "prompt_tokens_details": {"cached_tokens": 4},
}


def assistant(text: str) -> dict[str, Any]:
    """The message of an answer."""
    return {"role": "assistant", "content": text}


def assistant_calls(*tools: str) -> dict[str, Any]:
    """The message of an answer that calls tools without arguments."""
    tool_calls = [
        {"index": i, "id": f"call_{i}", "type": "function", "function": {"name": tool_name, "arguments": "{}"}}
        for i, tool_name in enumerate(tools)
    ]  # fmt: skip
    return {"role": "assistant", "content": None, "tool_calls": tool_calls}


class ReceivedRequests:
    """Received requests, in order."""

    def __init__(self) -> None:
        self.requests: list[tuple[str, dict[str, Any]]] = []
        self.auth_keys: list[str | None] = []
        """The ``Authorization`` header of each hint, and of each request to another route."""

    @property
    def custom_params(self) -> list[dict[str, Any]]:
        """``custom_params`` of each completion."""
        bodies = [body for path, body in self.requests if path.startswith("/v1")]
        return [body.get("custom_params") or {} for body in bodies]

    @property
    def hints(self) -> list[dict[str, Any]]:
        """Bodies of the hints."""
        return [body for path, body in self.requests if path == "/canopy/hint"]


@contextmanager
def chat_endpoint(
    answers: list[dict[str, Any]], other_answers: dict[str, Any] | None = None
) -> Iterator[tuple[str, ReceivedRequests]]:
    """Yield (URL, received requests). Answers beyond the list are ``done``. ``other_answers``: answers of routes
    other than OpenAI's and hints, which are a 404 otherwise."""
    received, remaining = ReceivedRequests(), list(answers)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self.reply_to_other_route()

        def reply_to_other_route(self) -> None:
            path = self.path.partition("?")[0]
            received.auth_keys.append(self.headers.get("Authorization"))
            if other_answers is None or path not in other_answers:
                self.send_error(404)
            else:
                self.reply("application/json", json.dumps(other_answers[path]).encode())

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            received.requests.append((self.path, body))
            if self.path == "/canopy/hint":
                received.auth_keys.append(self.headers.get("Authorization"))
                self.reply("application/json", b"{}")
                return
            if not self.path.startswith("/v1/"):
                self.reply_to_other_route()
                return
            message = remaining.pop(0) if remaining else assistant("done")
            reason = "tool_calls" if message.get("tool_calls") else "stop"
            completion_fields = {"id": "1", "created": 0, "model": "m"}
            if body.get("stream"):
                chunk = {**completion_fields, "object": "chat.completion.chunk"}
                parts = [
                    {**chunk, "choices": [{"index": 0, "delta": message, "finish_reason": None}]},
                    {**chunk, "choices": [{"index": 0, "delta": {}, "finish_reason": reason}]},
                ]
                if body.get("stream_options"):
                    parts.append({**chunk, "choices": [], "usage": USAGE})
                lines = [f"data: {json.dumps(part)}\n\n" for part in parts] + ["data: [DONE]\n\n"]
                self.reply("text/event-stream", "".join(lines).encode())
                return
            choice = {"index": 0, "finish_reason": reason, "message": message}
            completion = {**completion_fields, "object": "chat.completion", "choices": [choice]}
            completion["usage"] = USAGE
            self.reply("application/json", json.dumps(completion).encode())

        def reply(self, content_type: str, body: bytes) -> None:
            self.send_response(200)
            self.send_header("Content-Type", content_type)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}", received
        server.shutdown()
        thread.join()
