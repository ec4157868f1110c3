"""Fields of requests that pass real gateways, compared with the docs' table, and Canopy's reading of them."""

import asyncio
import importlib
import json
import logging
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from starlette.requests import Request as HttpRequest

from canopy_lab.sim.system import routing
from sglang_canopy.errors import CanopyError
from sglang_canopy.request import sent
from sglang_canopy.request.sent import TENANT_METADATA, RequireTenant, body_of, headers_of
from sglang_canopy.server.http import entry
from sglang_canopy.wire.stamp import STAMP_KEY
from support.gateways import GATEWAYS_VARIABLE, MODULES, FakeWorker, post, run_gateway, skip_without

CLIENTS_PAGE = Path(__file__).resolve().parents[2] / "docs" / "reference" / "clients.md"

BODY_FIELDS: dict[str, Any] = {
    "cache_salt": "salt",
    "extra_key": "key",
    "custom_params": {"canopy_category": "agent"},
    "session_id": "s",
    "rid": "c_t2",
    "prompt_cache_key": "k",
    "safety_identifier": "i",
    "user": "u",
    "metadata": {"canopy_cache_salt": "salt"},
    "previous_response_id": "resp_0",
    "nvext": {"agent_context": {"session_id": "s"}},
}
HEADERS = {
    name: f"value-of-{name}"
    for name in (
        *("x-smg-routing-key", "x-request-id", "x-session-id", "x-dynamo-session-id"),
        *("x-claude-code-session-id", "thread-id", "x-override-conversation-id"),
        *("x-canopy-cache-salt", "x-canopy-gateway-secret"),
    )
}
MESSAGES = [{"role": "user", "content": "hi"}]
ROUTE_BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": MESSAGES, "max_tokens": 4},
    "/v1/completions": {"prompt": "hi", "max_tokens": 4},
    "/generate": {"text": "hi", "sampling_params": {"max_new_tokens": 4}},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 4},
}
ARRIVED, DROPPED = "yes", "-"


@pytest.fixture(scope="module")
def workers():
    pair = [FakeWorker(), FakeWorker()]
    yield pair
    for worker in pair:
        worker.close()


def arrivals_by_route(url: str, workers: list[FakeWorker]) -> dict[str, dict[str, str]]:
    """Return route -> field or header -> whether it arrived as sent, or the status of a refusal."""
    outcomes: dict[str, dict[str, str]] = {}
    for route, body in ROUTE_BODIES.items():
        for worker in workers:
            worker.posts.clear()
        status, _ = post(url + route, {"model": "tiny", **BODY_FIELDS, **body}, HEADERS)
        (arrived,) = [received for worker in workers for received in worker.posts] or [None]
        if arrived is None:
            assert status == 404
            outcomes[route] = dict.fromkeys([*BODY_FIELDS, *HEADERS], str(status))
            continue
        outcomes[route] = {
            name: ARRIVED if values.get(name) == value else DROPPED
            for sent_values, values in ((BODY_FIELDS, arrived.body), (HEADERS, arrived.headers))
            for name, value in sent_values.items()
        }
    return outcomes


def documented_cells() -> dict[str, dict[str, dict[str, str]]]:
    """Return field -> gateway -> route -> cell of the page."""
    section = CLIENTS_PAGE.read_text(encoding="utf-8").split("## Behind gateways")[1]
    rows = [line for line in section.splitlines() if line.startswith("| `")]
    table: dict[str, dict[str, dict[str, str]]] = {}
    for row in rows:
        names, *cells = [cell.strip() for cell in row.strip("|").split("|")]
        by_gateway = {
            "sglang-router": dict(zip(ROUTE_BODIES, [*cells[:3], "404"])),
            "smg": dict(zip(ROUTE_BODIES, cells[3:])),
        }
        table |= {name.strip("`"): by_gateway for name in names.split(", ")}
    return table


@pytest.mark.parametrize("gateway", ["sglang-router", "smg"])
def test_the_page_lists_the_fields_that_pass_each_gateway(gateway, workers, tmp_path) -> None:
    with run_gateway(gateway, [worker.url for worker in workers], tmp_path / "log") as url:
        outcomes = arrivals_by_route(url, workers)
        assert post(f"{url}/canopy/hint", {"conversation": "c", "over": True})[0] == 404
    table = documented_cells()
    assert set(table) == {*BODY_FIELDS, *HEADERS}
    for name, by_gateway in table.items():
        for route, cell in by_gateway[gateway].items():
            assert cell == outcomes[route].get(name, DROPPED), (gateway, route, name)


def test_without_a_gateway_every_field_and_header_arrives(workers) -> None:
    outcomes = arrivals_by_route(workers[0].url, workers)
    assert all(set(arrivals.values()) <= {ARRIVED} for arrivals in outcomes.values())


@pytest.mark.parametrize("gateway", sorted(MODULES))
def test_the_simulators_router_has_the_constants_of_the_real_one(gateway, monkeypatch) -> None:
    skip_without(gateway)
    monkeypatch.setattr(sys, "path", [os.environ.get(GATEWAYS_VARIABLE, ""), *sys.path])
    router_args = importlib.import_module(f"{MODULES[gateway]}.router_args").RouterArgs
    assert router_args.policy == "cache_aware"
    assert router_args.cache_threshold == routing.MIN_MATCH_SHARE
    assert router_args.balance_abs_threshold == routing.MAX_IMBALANCE_REQUESTS
    assert router_args.balance_rel_threshold == routing.MAX_IMBALANCE_RATIO
    characters_per_block = 16 * 4
    assert router_args.max_tree_size == routing.MAX_KNOWN_BLOCKS * characters_per_block


def http_of(body: Any, **headers: str) -> HttpRequest:
    encoded_body = json.dumps(body).encode()

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": encoded_body, "more_body": False}

    raw_headers = [(k.replace("_", "-").lower().encode(), v.encode()) for k, v in headers.items()]
    request = HttpRequest({"type": "http", "method": "POST", "headers": raw_headers}, receive)
    asyncio.run(request.body())
    return request


def request_of(**fields: Any) -> SimpleNamespace:
    defaults = {"extra_key": None, "cache_salt": None, "sampling_params": {}}
    return SimpleNamespace(**defaults | fields)


def set_tenant(obj: SimpleNamespace, request: HttpRequest, carriers: str = "metadata") -> None:
    sent.set_tenant(obj, headers_of(request), body_of(request), carriers)


def test_metadata_sets_the_tenant_of_a_request() -> None:
    tenant_in_metadata = http_of({"metadata": {TENANT_METADATA["cache_salt"]: "a"}})
    obj = request_of()
    for _ in range(2):
        set_tenant(obj, tenant_in_metadata)
        assert (obj.extra_key, obj.cache_salt) == (None, "a")
    set_tenant(ignored := request_of(), tenant_in_metadata, "none")
    assert ignored.cache_salt is None
    set_tenant(messages := request_of(), http_of({"cache_salt": "a"}))  # SGLang's model has no salt
    assert messages.cache_salt == "a"
    set_tenant(untouched := request_of(cache_salt="salt"), http_of({"metadata": {"user_id": "u"}}))
    assert untouched.cache_salt == "salt"


@pytest.mark.parametrize(
    ("cache_salt", "metadata", "message"),
    [
        *((salt, {"cache_salt": "a"}, "several times, and differently") for salt in ("b", ["a", "b"])),
        *((salts, {"cache_salt": "a"}, "must be strings") for salts in ([7], [["a"]], [{}])),
        (None, {"extra_key": 7}, "must be strings"),
    ],
)  # fmt: skip
def test_a_tenant_that_differs_from_the_gateways_or_is_no_string_is_refused(
    cache_salt, metadata, message
) -> None:
    sent_metadata = {TENANT_METADATA[name]: value for name, value in metadata.items()}
    request = http_of({"metadata": sent_metadata})
    with pytest.raises(CanopyError, match=message):
        set_tenant(request_of(cache_salt=cache_salt), request)


def test_hints_in_metadata_count_if_custom_params_have_none(monkeypatch) -> None:
    metadata = {
        "canopy_category": "agent",
        "canopy_turn": "3",
        "canopy_over": "true",
        "canopy_conversation": "17",
        "someone_elses": "x",
    }
    without_metadata = request_of()
    entry.stamp_request(without_metadata, {"category": "chat"}, http_of({"metadata": metadata}))
    assert without_metadata.sampling_params["custom_params"][STAMP_KEY]["category"] == "chat"
    monkeypatch.setattr(entry.http_state, "tenant_carriers", "metadata")
    obj = request_of()
    entry.stamp_request(obj, {"category": "chat"}, http_of({"metadata": metadata}))
    stamp = obj.sampling_params["custom_params"][STAMP_KEY]
    assert {"category": "agent", "turn": 3, "over": True}.items() <= stamp.items()
    with_params = request_of(sampling_params={"custom_params": {"canopy_turn": 9}})
    entry.stamp_request(with_params, {}, http_of({"metadata": metadata}))
    assert with_params.sampling_params["custom_params"][STAMP_KEY]["turn"] == 9
    invalid = request_of()
    entry.stamp_request(invalid, {"turn": 2}, http_of({"metadata": {"canopy_turn": "soon"}}))
    assert invalid.sampling_params["custom_params"][STAMP_KEY]["turn"] == 2


@pytest.fixture
def set_rule(monkeypatch):
    def set_mode(mode: str) -> None:
        monkeypatch.setattr(entry.http_state, "require_tenant", RequireTenant(mode))

    return set_mode


def warnings_of(caplog, *requests: tuple[SimpleNamespace, HttpRequest]) -> list[str]:
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        for obj, request in requests:
            entry.stamp_request(obj, {}, request)
    return [record.getMessage() for record in caplog.records]


def test_a_worker_warns_once_if_only_some_requests_name_a_tenant(set_rule, caplog) -> None:
    set_rule("off")
    plain = http_of({}, X_Smg_Routing_Key="r")
    assert warnings_of(caplog, (request_of(), plain), (request_of(), plain)) == []
    warned = warnings_of(caplog, (request_of(cache_salt="a"), plain), *[(request_of(), plain)] * 3)
    assert len(warned) == 1
    assert "though others do" in warned[0]
    assert "x-smg-routing-key" in warned[0]
    assert TENANT_METADATA["cache_salt"] in warned[0]
    set_rule("warn")
    assert len(warnings_of(caplog, *[(request_of(), http_of({}))] * 3)) == 1


def test_a_missing_required_tenant_is_refused_but_for_internal_calls(set_rule, monkeypatch) -> None:
    set_rule("on")
    monkeypatch.setattr(entry.http_state, "tenant_carriers", "metadata")
    with pytest.raises(CanopyError, match="names no tenant"):
        entry.stamp_request(request_of(), {}, http_of({}))
    metadata = {TENANT_METADATA["cache_salt"]: "a"}
    entry.stamp_request(request_of(), {}, http_of({"metadata": metadata}))
    entry.stamp_request(request_of(extra_key="k"), {}, http_of({}))
    entry.stamp_request(request_of(), {})


def test_sglangs_own_requests_need_no_tenant(set_rule, monkeypatch) -> None:
    """Its warm-up and its health checks come over HTTP, and a refusal stops the server."""
    from sglang.srt.entrypoints import http_server
    from sglang.srt.managers.tokenizer_manager import ServerStatus

    set_rule("on")
    health = http_of({})
    health.scope["path"] = "/health"
    entry.stamp_request(request_of(), {}, health)
    manager = SimpleNamespace(server_status=ServerStatus.Starting)
    monkeypatch.setattr(http_server, "_global_state", SimpleNamespace(tokenizer_manager=manager))
    entry.stamp_request(request_of(), {}, http_of({}))
    manager.server_status = ServerStatus.Up
    with pytest.raises(CanopyError, match="names no tenant"):
        entry.stamp_request(request_of(), {}, http_of({}))


@pytest.mark.parametrize(
    "fields",
    [
        {"cache_salt": [""]},
        {"cache_salt": ["", ""]},
        {"cache_salt": ["a", ""]},
        {"cache_salt": []},
        {"extra_key": [""], "cache_salt": ""},
        {"extra_key": ["k", ""], "cache_salt": ["", ""]},
    ],
    ids=str,
)
def test_a_batch_with_a_prompt_without_a_tenant_is_refused(set_rule, fields) -> None:
    set_rule("on")
    with pytest.raises(CanopyError, match="names no tenant"):
        entry.stamp_request(request_of(**fields), {}, http_of({}))


def test_a_batch_whose_prompts_all_name_a_tenant_is_served(set_rule) -> None:
    set_rule("on")
    entry.stamp_request(request_of(cache_salt=["a", "b"]), {}, http_of({}))
    entry.stamp_request(request_of(extra_key=["k", ""], cache_salt=["", "s"]), {}, http_of({}))
    entry.stamp_request(request_of(extra_key="k", cache_salt=["", ""]), {}, http_of({}))


@pytest.mark.parametrize("cache_salts", [[""], ["", ""], ["a", ""], []], ids=str)
def test_a_gateways_tenant_is_that_of_every_prompt_of_a_batch(cache_salts) -> None:
    obj = request_of(cache_salt=cache_salts)
    metadata = {TENANT_METADATA["cache_salt"]: "a"}
    set_tenant(obj, http_of({"cache_salt": cache_salts, "metadata": metadata}))
    assert obj.cache_salt == "a"
