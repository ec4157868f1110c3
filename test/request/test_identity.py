"""The conversation of a request, from fields and headers that clients send anyway."""

import asyncio
import json
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.requests import Request as HttpRequest

from sglang_canopy.radix.live_request import make_live_request
from sglang_canopy.request.identity import find_conversation
from sglang_canopy.request.sent import body_of
from sglang_canopy.server.http import entry
from sglang_canopy.wire.stamp import STAMP_KEY, make_stamp, read_stamp
from support.live_tree import fake_req


def http_request(body: Any, headers: dict[str, str] | None = None) -> HttpRequest:
    """Return a Starlette request whose body was read already, as before every route."""
    encoded_body = body if isinstance(body, bytes) else json.dumps(body).encode()

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": encoded_body, "more_body": False}

    raw_headers = [(name.lower().encode(), v.encode()) for name, v in (headers or {}).items()]
    request = HttpRequest({"type": "http", "method": "POST", "headers": raw_headers}, receive)
    asyncio.run(request.body())
    return request


def stamp_of(body: Any, headers: dict[str, str] | None = None, **fields: Any) -> dict[str, Any]:
    """Return the stamp that the entry gives a request with this body and these headers."""
    request = SimpleNamespace(sampling_params={}, **fields)
    entry.stamp_request(request, {"category": "chat", "turn": 1}, http_request(body, headers))
    return request.sampling_params["custom_params"][STAMP_KEY]


@pytest.mark.parametrize(
    ("body", "headers", "fields"),
    [
        ({"session_id": "s"}, {}, {"conversation": "s"}),
        ({}, {"X-Dynamo-Session-ID": "d"}, {"conversation": "d"}),
        (
            {},
            {
                "x-dynamo-session-id": "d",
                "x-dynamo-parent-session-id": "up",
                "x-dynamo-session-final": "True",
            },
            {"conversation": "d", "over": True},
        ),
        (
            {"nvext": {"agent_context": {"session_id": "n", "parent_session_id": "up"}}},
            {},
            {"conversation": "n"},
        ),
        ({}, {"x-claude-code-session-id": "cc"}, {"conversation": "cc"}),
        (
            {},
            {"x-claude-code-session-id": "cc", "x-claude-code-agent-id": "a1"},
            {"conversation": "cc/a1"},
        ),
        (
            {},
            {
                "x-claude-code-session-id": "cc",
                "x-claude-code-agent-id": "a2",
                "x-claude-code-parent-agent-id": "a1",
            },
            {"conversation": "cc/a2"},
        ),
        ({}, {"x-session-id": "x", "x-parent-session-id": "up"}, {"conversation": "x"}),
        ({}, {"thread-id": "t", "x-codex-parent-thread-id": "t0"}, {"conversation": "t"}),
        ({}, {"x-override-conversation-id": "o"}, {"conversation": "o"}),
        ({"rid": "conv_t2"}, {}, {"conversation": "conv", "turn": 2}),
        ({}, {"x-request-id": "c-9-turn12"}, {"conversation": "c-9", "turn": 12}),
        (
            {"metadata": {"user_id": "user_1f_account_2e_session_0b-4"}},
            {},
            {"conversation": "0b-4"},
        ),
        ({"session_id": "s"}, {"x-session-id": "x"}, {"conversation": "s"}),
        ({"rid": "no-lineage"}, {"x-request-id": "7"}, {}),
        ({}, {}, {}),
    ],
)
def test_each_source_names_the_conversation_and_the_first_counts(body, headers, fields) -> None:
    sent_fields = find_conversation(body, http_request(body, headers).headers)
    assert sent_fields == (fields | {"linear": True} if fields else {})


def test_the_entry_reads_fields_that_sglangs_models_drop() -> None:
    assert stamp_of({"session_id": "s", "x": "y" * 9})["conversation"] == "s"
    assert stamp_of({"rid": "c_t3"})["turn"] == 3
    assert "conversation" not in stamp_of({"model": "m"})


def test_canopy_conversation_overrides_all_other_names() -> None:
    request = SimpleNamespace(sampling_params={"custom_params": {"canopy_conversation": "named"}})
    headers = {"x-dynamo-session-id": "d", "x-dynamo-session-final": "true"}
    entry.stamp_request(request, {}, http_request({}, headers))
    stamp = request.sampling_params["custom_params"][STAMP_KEY]
    assert stamp["conversation"] == "named"
    assert not {"over", "linear"} & stamp.keys()


def test_long_names_are_shortened_and_stay_distinct() -> None:
    first, second = ("x" * 5000 + end for end in "ab")
    names = {find_conversation({"session_id": n}, {})["conversation"] for n in (first, second)}
    assert len(names) == 2
    assert all(len(name) <= 128 for name in names)


@pytest.mark.parametrize("body", [b"", b"not json", b"[1]", b'"text"', b"\xff"])
def test_a_body_that_is_not_an_object_has_no_fields(body: bytes) -> None:
    assert body_of(http_request(body)) == {}
    assert body_of(None) == {}
    assert body_of(SimpleNamespace(headers={})) == {}


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=9), inner),
    max_leaves=6,
)
BODY_KEYS = st.sampled_from(["session_id", "rid", "nvext", "metadata"])
CONTEXT = st.fixed_dictionaries({"agent_context": VALUES | st.dictionaries(st.text(), VALUES)})


@given(st.dictionaries(BODY_KEYS, VALUES | CONTEXT), st.text(), st.text())
def test_every_stamp_survives_serialisation_to_the_scheduler(body, session, agent) -> None:
    headers = {"x-claude-code-session-id": session, "x-claude-code-agent-id": agent}
    fields = find_conversation(body, headers)
    stamp = make_stamp({}, fields, 5.0)
    assert read_stamp({STAMP_KEY: stamp}) == stamp
    request = make_live_request(fake_req([], [], stamp), 0.0, 16)
    assert (request.time, request.conversation) == (5.0, fields.get("conversation"))
