"""Access to Canopy's routes, over HTTP behind SGLang's own check of keys."""

import contextlib
import json
from collections.abc import Iterator
from http.client import HTTPConnection
from types import SimpleNamespace
from typing import Any

import pytest

from sglang_canopy.request.client_hints import SECRET_VARIABLE
from support.served_routes import ADMIN_KEY, HINT, SECRET, USER_KEY, HttpClient, Serve, gateway

READ_ROUTES = (("GET", "/canopy/status"), ("GET", "/canopy/explain"))
CHANGE_ROUTES = (("POST", "/canopy/hint"), ("DELETE", "/canopy/documents"))
REFUSED_CODES = (401, 403)


def test_a_tokenizer_worker_checks_the_administrators_key(serve: Serve) -> None:
    with serve(admin_api_key=ADMIN_KEY, is_worker=True) as http:
        assert admissions(http, CHANGE_ROUTES, None) == {False}
        assert admissions(http, CHANGE_ROUTES, ADMIN_KEY) == {True}


def admissions(http: HttpClient, routes: tuple[tuple[str, str], ...], key: str | None) -> set[bool]:
    """Return whether the key check let the routes through: one element if all are alike."""
    return {http(method, path, key).code not in REFUSED_CODES for method, path in routes}


@pytest.mark.parametrize(
    ("keys", "key", "may_read", "changes"),
    [
        ({}, None, True, True),
        ({"api_key": USER_KEY}, None, False, False),
        ({"api_key": USER_KEY}, USER_KEY, True, True),
        ({"admin_api_key": ADMIN_KEY}, None, True, False),
        ({"admin_api_key": ADMIN_KEY}, ADMIN_KEY, True, True),
        ({"api_key": USER_KEY, "admin_api_key": ADMIN_KEY}, None, False, False),
        ({"api_key": USER_KEY, "admin_api_key": ADMIN_KEY}, USER_KEY, True, False),
        ({"api_key": USER_KEY, "admin_api_key": ADMIN_KEY}, ADMIN_KEY, True, True),
        ({"api_key": USER_KEY, "admin_api_key": ADMIN_KEY}, "a guess", False, False),
    ],
)
def test_users_read_and_only_the_administrator_changes_state(serve, keys, key, may_read, changes):
    with serve(**keys) as http:
        assert admissions(http, READ_ROUTES, key) == {may_read}
        assert admissions(http, CHANGE_ROUTES, key) == {changes}


@pytest.mark.parametrize(("method", "path"), CHANGE_ROUTES)
@pytest.mark.parametrize("origin", ["http://evil.example", "null", "https://127.0.0.1"])
def test_a_page_of_another_origin_changes_nothing(serve, method, path, origin):
    with serve(admin_api_key=ADMIN_KEY) as http:
        code, text = http(method, path, ADMIN_KEY, HINT, Origin=origin)
        assert code == 403
        assert origin in text
        assert http(method, path, ADMIN_KEY, Origin=origin).code == 403, "without a body, too"
        assert not http.manager.messages


def test_a_page_of_the_servers_own_origin_may_send_hints(serve: Serve) -> None:
    with serve() as http:
        server_origin = f"https://127.0.0.1:{http.port}"
        assert http("POST", "/canopy/hint", None, HINT, Origin=server_origin).code == 200


@pytest.mark.parametrize(("method", "path"), CHANGE_ROUTES)
@pytest.mark.parametrize("content_type", ["text/plain", "application/x-www-form-urlencoded", ""])
def test_a_body_that_browsers_send_without_permission_is_refused(serve, method, path, content_type):
    with serve() as http:
        code, text = http(method, path, None, HINT, Content_Type=content_type)
        assert code == 415
        assert "application/json" in text
        assert not http.manager.messages


def test_a_body_of_unknown_length_is_read_no_further_than_its_limit(serve):
    sent_bytes = 0

    def endless_body() -> Iterator[bytes]:
        nonlocal sent_bytes
        while sent_bytes < 1 << 30:
            sent_bytes += 1 << 16
            yield b" " * (1 << 16)

    with serve() as http:
        with contextlib.suppress(OSError):  # it may close the connection before the body's end
            assert http("POST", "/canopy/hint", None, endless_body()).code == 400
        assert sent_bytes < 128 << 20
        assert http("GET", "/canopy/status").code == 200


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\xff\xfe",
        b"[" * 4000,
        b'{"conversation": "a", "return_in_s": 1' + b"0" * 400 + b"}",
        b'{"conversation": "a", "keep_s": NaN}',
        b'{"conversation": "\\ud800", "over": true}',
        b'{"conversation": "a", "over": true, "cache_salt": 7}',
        b'{"conversation": "a", "over": true, "extra_key": ["k"]}',
    ],
)
def test_a_malformed_body_is_answered_with_400(serve: Serve, body: bytes) -> None:
    with serve() as http:
        code, text = http("POST", "/canopy/hint", None, body)
        assert code == 400, text
        assert json.loads(text)["error"]["message"]


@pytest.mark.parametrize(
    ("requested", "is_cache_off", "policy"),
    [("wa", False, None), ("auto", False, None), ("lru", False, "lru"), ("lru", True, None)],
)
def test_the_status_shows_the_policy_that_runs_and_not_the_requested_one(
    serve: Serve, requested: str, is_cache_off: bool, policy: str | None
) -> None:
    with serve(radix_eviction_policy=requested, disable_radix_cache=is_cache_off) as http:
        status = json.loads(http("GET", "/canopy/status").text)
        assert (status["policy"], status["policy_config"], status["ranks"]) == (policy, {}, [])
        assert ("No eviction policy" in status["next_step"]) == (policy is None)


@pytest.mark.parametrize("header", ["X-Canopy-Cache-Salt", "X-Canopy-Extra-Key"])
def test_a_tenant_header_that_is_sent_twice_is_refused(serve, header):
    with serve() as http:
        connection = HTTPConnection("127.0.0.1", http.port, timeout=30)
        connection.putrequest("GET", "/canopy/explain?conversation=c")
        connection.putheader(header, "named by the client")
        connection.putheader(header, "named by the gateway")
        connection.endheaders()
        response = connection.getresponse()
        assert (response.status, header in response.read().decode()) == (400, True)
        connection.close()


def test_a_tenant_that_the_query_names_twice_is_refused(serve: Serve) -> None:
    with serve() as http:
        assert http("DELETE", "/canopy/documents?cache_salt=a&cache_salt=b").code == 400
        assert http("DELETE", "/canopy/documents?cache_salt=a&cache_salt=a").code == 200
        assert http.manager.messages == [{"canopy_documents:a": 1}]


def test_neither_status_nor_an_error_shows_a_secret(serve, monkeypatch):
    monkeypatch.setenv(SECRET_VARIABLE, SECRET)
    from sglang_canopy.server.http import entry

    with serve(admin_api_key=ADMIN_KEY, hints="trusted") as http:
        text = http("GET", "/canopy/status", ADMIN_KEY).text
        text += http("POST", "/canopy/hint", "wrong", HINT, **gateway("wrong")).text
        text += repr(entry.http_state.hint_rule)
    assert SECRET not in text
    assert ADMIN_KEY not in text


@pytest.fixture
def tree(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A tree with a conversation ``c`` of two tenants in it."""
    from sglang_canopy.telemetry import reporter
    from support.live_tree import LiveTree

    monkeypatch.setattr(reporter, "rank_and_peer", lambda: (0, ""))  # there is no scheduler process
    tree = LiveTree(64, "wa", {"quantum_tokens": 1})
    for tenant, first in (("x", 0), ("y", 100)):
        tree.serve(list(range(first, first + 8)), 1.0 + first, conversation="c", tenant=tenant)
    return tree


def connect_tree(http: HttpClient, tree: Any) -> None:
    """Let ``tree`` process the routes' messages, as a scheduler that has reported once."""
    from sglang_canopy.wire import status_file

    http.manager.scheduler = SimpleNamespace(tree_cache=tree.cache)
    status_file.write_status(0, {"running": tree.core.live.ranking_policy_name})


def test_a_tenant_sees_only_its_own_conversations(serve, tree, monkeypatch):
    from sglang_canopy.server.http import explaining

    monkeypatch.setattr(explaining, "ANSWER_INTERVAL_S", 1e-9)
    explain = ("GET", "/canopy/explain?conversation=c")
    with serve(api_key=USER_KEY, admin_api_key=ADMIN_KEY) as http:
        assert http(*explain, ADMIN_KEY).code == 409  # no scheduler has reported
        connect_tree(http, tree)
        assert http(*explain).code == 401
        code, text = http(*explain, ADMIN_KEY)
        assert code == 200
        (conversations,) = json.loads(text)["replicas"]
        assert len(conversations) == 2
        for salt, device_tokens in (("x", 8), ("y", 8), ("z", 0), (None, 0)):
            salt_header = {} if salt is None else {"X-Canopy-Cache-Salt": salt}
            explained = json.loads(http(*explain, USER_KEY, **salt_header).text)
            (conversation,) = explained["replicas"][0]
            assert conversation["tokens"]["device"] == device_tokens
            assert "tenant" in conversation
            assert conversation["tenant"] != salt or salt is None
        assert http("GET", "/canopy/explain", USER_KEY).code == 400
        assert http("GET", "/canopy/explain?conversation=%00", USER_KEY).code == 400
        assert all("canopy_explain:" in key for message in http.manager.messages for key in message)


def test_answers_to_users_are_limited_in_rate(serve, tree, monkeypatch):
    from sglang_canopy.server.http import explaining

    monkeypatch.setattr(explaining, "ANSWER_INTERVAL_S", 3600.0)
    explain = ("GET", "/canopy/explain?conversation=c")
    with serve(admin_api_key=ADMIN_KEY) as http:
        connect_tree(http, tree)
        assert [http(*explain).code for _ in range(3)] == [200, 429, 429]
        assert http(*explain, ADMIN_KEY).code == 200


NESTED_BODY = b'{"server_args": {"canopy_hints:[]": 1}, "x": %s}' % (b"[" * 1015 + b"]" * 1015)
"""A body that SGLang's parser reads and Python's does not."""


@pytest.mark.parametrize(
    ("body", "code"),
    [
        ({"server_args": {"canopy_hints:[]": 1}}, 403),
        ({"server_args": {"pp_max_micro_batch_size": 8}}, 404),  # passed on; no such route here
        (b'{"server_args": {"\\u0063anopy_drain:": 1}}', 403),
        (NESTED_BODY, 400),
        ({"server_args": ["canopy_hints:[]"]}, 400),
    ],
)
@pytest.mark.parametrize("is_worker", [False, True])
def test_sglangs_route_sends_no_command_of_canopys(
    serve: Serve, body: Any, code: int, is_worker: bool
) -> None:
    with serve(admin_api_key=ADMIN_KEY, is_worker=is_worker) as http:
        assert http("POST", "/set_internal_state", ADMIN_KEY, body).code == code


def test_keys_are_checked_before_a_body_is_read(serve: Serve) -> None:
    with serve(api_key=USER_KEY) as http:
        assert http("POST", "/generate", None, {"stream": True, "extra_key": 5}).code == 401
        assert http("POST", "/generate", USER_KEY, {"stream": True, "extra_key": 5}).code == 400
