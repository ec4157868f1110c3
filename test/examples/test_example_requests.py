"""Requests of the examples, parsed by the server's own code.

The answers are made up; test/served/test_examples.py uses a real server.
"""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from sglang_canopy.wire.hints import hint_of
from sglang_canopy.wire.stamp import client_fields
from support.example_files import load

pytest.importorskip("openai")


@pytest.fixture
def endpoint():
    """(URL, requests): an OpenAI API that answers with the number of the request."""
    seen: list[tuple[str, dict[str, Any]]] = []

    class Handler(BaseHTTPRequestHandler):
        def reply(self, body: Any) -> None:
            raw = json.dumps(body).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(raw)))
            self.end_headers()
            self.wfile.write(raw)

        def do_GET(self) -> None:
            self.reply({"object": "list", "data": [{"id": "m", "object": "model", "created": 0, "owned_by": "x"}]})  # fmt: skip

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            seen.append((self.path, body))
            text = str(len(seen))
            choice = {"index": 0, "finish_reason": "stop", "text": text, "message": {"role": "assistant", "content": text}}  # fmt: skip
            usage = {"prompt_tokens": 9, "completion_tokens": 1, "total_tokens": 10, "prompt_tokens_details": {"cached_tokens": 4}}  # fmt: skip
            self.reply({"id": "1", "object": "x", "created": 0, "model": "m", "choices": [choice], "usage": usage})  # fmt: skip

        def log_message(self, *args: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}", seen
        server.shutdown()


def test_an_agent_hints_its_return_and_its_end(endpoint) -> None:
    url, seen = endpoint
    agent = load("agent_loop")
    agent.TOOL_S = 0.0
    assert agent.main(url, "Which leaf goes first?") == ["1", "2", "3"]
    *turns, (path, hint) = seen
    told = [client_fields(body["custom_params"])[0] for _, body in turns]
    assert [fields["turn"] for fields in told] == [1, 2, 3]
    assert ["return_in_s" in fields for fields in told] == [True, True, False]
    assert path == "/canopy/hint"
    assert hint_of(hint, 0.0)["over"] is True
    # Each prompt extends the previous one, so that the cache can hit.
    prompts = [body["messages"] for _, body in turns]
    assert prompts[1][: len(prompts[0])] == prompts[0]


def test_each_tenant_has_a_salt_of_its_own(endpoint) -> None:
    url, seen = endpoint
    assert load("two_tenants").main(url) == {"ann": [4, 4], "bob": [4, 4]}
    salts = [body["cache_salt"] for _, body in seen]
    assert salts[0] == salts[1] != salts[2] == salts[3]
    assert min(map(len, salts)) >= 16
