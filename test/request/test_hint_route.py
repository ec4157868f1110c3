"""``POST /canopy/hint``: who may send hints, for which tenant, and how often."""

import json
import time
from http.client import HTTPConnection

import pytest

from sglang_canopy.request.client_hints import SECRET_VARIABLE
from sglang_canopy.tenant import tenant_of
from sglang_canopy.wire.hints import MAX_TENANT_BURST, unpack
from sglang_canopy.wire.messages import HINTS
from support.served_routes import ADMIN_KEY, HINT, SECRET, USER_KEY, HttpClient, Serve, gateway

BOTH_KEYS = {"api_key": USER_KEY, "admin_api_key": ADMIN_KEY}


def test_a_hint_is_forwarded_to_the_schedulers(serve: Serve) -> None:
    with serve() as http:
        assert http("POST", "/canopy/hint", None, HINT) == (200, '{"waiting":1}')
        (message,) = messages_of(http, 1)
        assert [h["conversation"] for h in unpack(message.removeprefix(HINTS.prefix))] == ["a"]
        assert json.loads(http("GET", "/canopy/status").text)["hints_waiting"] == 0


def messages_of(http: HttpClient, count: int) -> list[str]:
    """Return the messages once there are ``count``. Each call of a route lets the event loop continue."""
    for _ in range(1000):
        if len(http.manager.messages) >= count:
            break
        http("GET", "/canopy/status")
    return [key for message in http.manager.messages for key in message]


@pytest.mark.parametrize(
    ("body_fields", "headers", "tenant"),
    [
        ({}, {"X_Canopy_Cache_Salt": "s"}, tenant_of(None, "s")),
        ({"cache_salt": "s"}, {"X_Canopy_Extra_Key": "k"}, tenant_of("k", "s")),
        ({"cache_salt": "s"}, {"X_Canopy_Cache_Salt": "s"}, tenant_of(None, "s")),
        ({}, {}, None),
    ],
)
def test_a_hint_takes_its_tenant_from_the_headers_that_documents_take_it_from(
    serve: Serve, body_fields: dict[str, str], headers: dict[str, str], tenant: str | None
) -> None:
    with serve() as http:
        assert http("POST", "/canopy/hint", None, {**HINT, **body_fields}, **headers).code == 200
        (message,) = messages_of(http, 1)
        assert [hint["tenant"] for hint in unpack(message.removeprefix(HINTS.prefix))] == [tenant]


def test_a_hint_above_the_tenants_rate_is_refused_with_retry_after(serve: Serve) -> None:
    from sglang_canopy.server.http import routes

    with serve() as http:
        much_later = time.monotonic() + 3600.0
        for _ in range(MAX_TENANT_BURST):
            routes.waiting_hints.add(HINT, much_later)
        connection = HTTPConnection("127.0.0.1", http.port, timeout=30)
        body = json.dumps(HINT)
        connection.request("POST", "/canopy/hint", body, {"Content-Type": "application/json"})
        response = connection.getresponse()
        assert (response.status, response.headers["Retry-After"]) == (429, "1")
        assert b"hints a second" in response.read()
        connection.close()
        assert http("POST", "/canopy/hint", None, {**HINT, "cache_salt": "another"}).code == 200


def test_a_hint_whose_body_names_another_tenant_than_the_gateway_is_refused(serve: Serve) -> None:
    with serve() as http:
        body = {**HINT, "cache_salt": "somebody else"}
        code, text = http("POST", "/canopy/hint", None, body, X_Canopy_Cache_Salt="s")
        assert code == 400
        assert "X-Canopy-Cache-Salt" in text
        assert not http.manager.messages


def test_with_hints_off_the_route_is_closed_to_all(serve, monkeypatch):
    monkeypatch.setenv(SECRET_VARIABLE, SECRET)
    with serve(admin_api_key=ADMIN_KEY, hints="off") as http:
        for credentials in ({"key": ADMIN_KEY}, {"key": ADMIN_KEY, **gateway(SECRET)}):
            code, text = http("POST", "/canopy/hint", body=HINT, **credentials)
            assert code == 403
            assert "--canopy-client-hints off" in text


@pytest.mark.parametrize(
    ("keys", "headers", "code"),
    [
        ({}, {}, 403),
        ({}, gateway(SECRET), 200),
        ({}, gateway(SECRET + "x"), 403),
        ({}, gateway("gu\xe9ss"), 403),
        ({"api_key": USER_KEY}, {"key": USER_KEY}, 403),
        ({"api_key": USER_KEY}, gateway(SECRET), 401),
        ({"api_key": USER_KEY}, {"key": USER_KEY, **gateway(SECRET)}, 200),
        ({"admin_api_key": ADMIN_KEY}, {"key": ADMIN_KEY}, 200),
        ({"admin_api_key": ADMIN_KEY}, {}, 401),
        ({"admin_api_key": ADMIN_KEY}, gateway(SECRET), 200),
        (BOTH_KEYS, {"key": ADMIN_KEY}, 200),
        (BOTH_KEYS, {"key": USER_KEY}, 401),
        (BOTH_KEYS, {"key": USER_KEY, **gateway(SECRET)}, 200),
    ],
)
def test_trusted_hints_come_from_the_administrator_or_the_gateway(
    serve: Serve,
    monkeypatch: pytest.MonkeyPatch,
    keys: dict[str, str],
    headers: dict[str, str],
    code: int,
) -> None:
    monkeypatch.setenv(SECRET_VARIABLE, SECRET)
    with serve(**keys, hints="trusted") as http:
        assert http("POST", "/canopy/hint", body=HINT, **headers).code == code
