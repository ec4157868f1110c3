"""Every route that generates supports the same fields, and treats the same mistakes alike.

No route shows a key.
"""

import json
from typing import Any

import pytest

from sglang_canopy.tenant import DOCUMENTS_MARK
from support.served import until

pytestmark = pytest.mark.xdist_group("metrics")
TEXT = "Which leaf goes first? " * 8
TOOL = {"name": "look", "description": "d", "parameters": {"type": "object", "properties": {}}}
SCHEMA = {"name": "look", "description": "d", "input_schema": {"type": "object"}}
CHAT = [{"role": "user", "content": TEXT}]
LATER = [*CHAT, {"role": "assistant", "content": "a"}, {"role": "user", "content": "b"}]

ROUTES: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "/generate": ({"text": TEXT}, {"text": TEXT}, "generate"),
    "/v1/completions": (
        {"model": "m", "prompt": TEXT},
        {"model": "m", "prompt": TEXT},
        "completion",
    ),
    "/v1/chat/completions": (
        {"model": "m", "messages": CHAT},
        {"model": "m", "messages": LATER, "tools": [{"type": "function", "function": TOOL}]},
        "chat-tools",
    ),
    "/v1/responses": (
        {"model": "m", "input": TEXT},
        {"model": "m", "input": LATER, "tools": [{"type": "function", **TOOL}]},
        "chat-tools",
    ),
    "/v1/messages": (
        {"model": "m", "messages": CHAT},
        {"model": "m", "messages": LATER, "tools": [SCHEMA]},
        "chat-tools",
    ),
    "/invocations": ({"model": "m", "messages": CHAT}, {"model": "m", "messages": LATER}, "chat"),
    "/api/chat": ({"model": "m", "messages": CHAT}, {"model": "m", "messages": LATER}, "chat"),
    "/api/generate": ({"model": "m", "prompt": TEXT}, {"model": "m", "prompt": TEXT}, "generate"),
}
"""Path -> a body, a second turn's body with tools, and the category of the second."""

LIMITS = {
    "/generate": {"sampling_params": {"max_new_tokens": 2, "temperature": 0}},
    "/v1/responses": {"max_output_tokens": 2},
    "/api/chat": {"options": {"num_predict": 2}},
    "/api/generate": {"options": {"num_predict": 2}},
}


def sent(path: str, body: dict[str, Any], params: Any, stream: bool = False) -> dict[str, Any]:
    whole = {**body, **LIMITS.get(path, {"max_tokens": 2}), "stream": stream}
    if params is None:
        return whole
    if path == "/generate":
        return {**whole, "sampling_params": {**whole["sampling_params"], "custom_params": params}}
    return {**whole, "custom_params": params}


@pytest.fixture
def client(metrics_server: Any) -> Any:
    return metrics_server


def until_counted(client: Any, category: str, before: int = 0) -> None:
    until(lambda: client.requests_by_category().get(category, 0) > before)


@pytest.mark.parametrize("path", ROUTES)
def test_category_turn_tools_and_hints_are_read(client: Any, path: str) -> None:
    first, second, category = ROUTES[path]
    name = "from" + path.replace("/", "-")
    given = {"canopy_category": name, "canopy_turn": 2, "canopy_conversation": f"c{path}"}
    code, text = client.send(path, sent(path, first, given))
    assert code == 200, text
    until_counted(client, name)
    explained = json.loads(client.get(f"/canopy/explain?conversation=c{path}"))
    assert explained["replicas"][0][0]["cached"], explained
    before = client.requests_by_category().get(category, 0)
    code, text = client.send(path, sent(path, second, None))
    assert code == 200, text
    until_counted(client, category, before)


@pytest.mark.parametrize("path", ["/generate", "/v1/completions", "/v1/chat/completions"])
def test_four_answers_to_one_request_count_once(client: Any, path: str) -> None:
    first, _, _ = ROUTES[path]
    name = "four" + path.replace("/", "-")
    for _ in range(2):
        body = sent(path, first, {"canopy_category": name, "canopy_conversation": f"n{path}"})
        if path == "/generate":
            body["sampling_params"] |= {"n": 4, "temperature": 1}
        else:
            body |= {"n": 4, "temperature": 1}
        code, text = client.send(path, body)
        assert code == 200, text
        answers = json.loads(text)
        assert len(answers if path == "/generate" else answers["choices"]) == 4
    assert client.send(path, sent(path, first, {"canopy_category": f"last-{name}"}))[0] == 200
    until_counted(client, f"last-{name}")  # so all that ended before are in the status
    assert client.requests_by_category()[name] == 2


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ROUTES)
def test_a_wrong_hint_is_ignored_and_a_wrong_tenant_refused_with_400(
    client: Any, path: str, stream: bool
) -> None:
    body = ROUTES[path][0]
    wrong = {"canopy_turn": 0, "canopy_nonsense": 1, "canopy": {"time": 0}}
    assert client.send(path, sent(path, body, wrong, stream))[0] == 200
    ignored = client.status()["ignored_fields"]
    assert ignored.keys() >= {"canopy_turn", "other"}
    code, text = client.send(path, sent(path, {**body, "extra_key": DOCUMENTS_MARK}, None, stream))
    assert (code, "extra_key" in text) == (400, True), text


USER, ADMIN = "user-s3cr3t-41c7", "admin-s3cr3t-90be"
ACTS = ("start_", "stop_", "dump_", "flush_", "expert_distribution", "profile")
"""Parts of routes that change a server; some stop a server without experts."""


def test_no_route_and_no_line_of_the_log_shows_a_key(server: Any, tiny_model: Any) -> None:
    flags = ("--radix-eviction", "wa", "--api-key", USER, "--admin-api-key", ADMIN)
    flags += ("--log-requests",)
    keys = [{}, *({"Authorization": f"Bearer {key}"} for key in (USER, ADMIN))]
    with server(tiny_model, *flags, kv_tokens=2048) as client:
        routes = json.loads(client.send("/openapi.json", **keys[1])[1])["paths"]
        paths = [path for path, of in routes.items() if "get" in of and "{" not in path]
        paths = [path for path in paths if not any(part in path for part in ACTS)]
        assert "/server_info" in paths
        assert "admin_api_key" in client.send("/server_info", **keys[1])[1]
        paths += ["/metrics", "/canopy/status", "/canopy/ui", "/canopy/explain?conversation=c"]
        shown = {
            f"{path} with key {n}": client.send(path, **key)[1]
            for path in paths
            for n, key in enumerate(keys)
        }
        body = {"model": "m", "messages": CHAT, "max_tokens": 2}
        assert client.send("/v1/chat/completions", body, **keys[1])[0] == 200
        shown["the log"] = client.server.log_text()
    found = [where for where, text in shown.items() if any(s in text for s in (USER, ADMIN))]
    assert found == []
