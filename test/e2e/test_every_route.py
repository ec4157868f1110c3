"""Every route that generates supports the same fields, and treats the same mistakes alike."""

import json
import time
import urllib.error
import urllib.request
from typing import Any

import pytest

from sglang_canopy.tenant import DOCUMENTS_MARK

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


def call(client: Any, path: str, body: dict[str, Any]) -> tuple[int, str]:
    raw = json.dumps(body).encode()
    request = urllib.request.Request(client.url + path, raw, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=120) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


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


def requests_by_category(client: Any) -> dict[str, int]:
    (rank,) = json.loads(client.get("/canopy/status"))["ranks"]
    return {row["category"]: row["requests"] for row in rank["categories"]}


def until_counted(client: Any, category: str, before: int) -> None:
    deadline = time.monotonic() + 60
    while requests_by_category(client).get(category, 0) <= before:
        assert time.monotonic() < deadline, (category, requests_by_category(client))
        time.sleep(0.1)


@pytest.mark.parametrize("path", ROUTES)
def test_category_turn_tools_and_hints_are_read(client: Any, path: str) -> None:
    first, second, category = ROUTES[path]
    name = "from" + path.replace("/", "-")
    given = {"canopy_category": name, "canopy_turn": 2, "canopy_conversation": f"c{path}"}
    code, text = call(client, path, sent(path, first, given))
    assert code == 200, text
    until_counted(client, name, 0)
    explained = json.loads(client.get(f"/canopy/explain?conversation=c{path}"))
    assert explained["replicas"][0][0]["cached"], explained
    before = requests_by_category(client).get(category, 0)
    code, text = call(client, path, sent(path, second, None))
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
        code, text = call(client, path, body)
        assert code == 200, text
        answers = json.loads(text)
        assert len(answers if path == "/generate" else answers["choices"]) == 4
    assert call(client, path, sent(path, first, {"canopy_category": f"last-{name}"}))[0] == 200
    until_counted(client, f"last-{name}", 0)  # so all that ended before are in the status
    assert requests_by_category(client)[name] == 2


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ROUTES)
def test_a_wrong_hint_is_ignored_and_a_wrong_tenant_refused_with_400(
    client: Any, path: str, stream: bool
) -> None:
    body = ROUTES[path][0]
    wrong = {"canopy_turn": 0, "canopy_nonsense": 1, "canopy": {"time": 0}}
    assert call(client, path, sent(path, body, wrong, stream))[0] == 200
    ignored = json.loads(client.get("/canopy/status"))["ignored_fields"]
    assert ignored.keys() >= {"canopy_turn", "other"}
    code, text = call(client, path, sent(path, {**body, "extra_key": DOCUMENTS_MARK}, None, stream))
    assert (code, "extra_key" in text) == (400, True), text
