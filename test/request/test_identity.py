"""The conversation of a request, from fields and headers that clients send anyway."""

import asyncio
import json
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.requests import Request as HttpRequest

from sglang_canopy.errors import CanopyError
from sglang_canopy.radix.live_request import live_request
from sglang_canopy.request.identity import SOURCES, Identities, sources_of
from sglang_canopy.request.responses import MAX_RESPONSES, MAX_TENANTS, Responses
from sglang_canopy.request.sent import body_of
from sglang_canopy.server.http import entry
from sglang_canopy.wire.stamp import STAMP_KEY, make_stamp, read_stamp
from support.stamped_req import stamped_req

EVERY = Identities(sources_of("all"))


def http(body: Any, headers: dict[str, str] | None = None, read: bool = True) -> HttpRequest:
    """A Starlette request; ``read``: its body was read already, as before every route."""
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": raw, "more_body": False}

    lines = [(k.lower().encode(), v.encode()) for k, v in (headers or {}).items()]
    request = HttpRequest({"type": "http", "method": "POST", "headers": lines}, receive)
    if read:
        asyncio.run(request.body())
    return request


def stamped(body: Any, headers: dict[str, str] | None = None, **obj: Any) -> dict[str, Any]:
    """The stamp that the entry gives a request with this body and these headers."""
    adapted = SimpleNamespace(sampling_params={}, **obj)
    entry.stamp(adapted, {"category": "chat", "turn": 1}, http(body, headers))
    return adapted.sampling_params["custom_params"][STAMP_KEY]


@pytest.mark.parametrize(
    ("body", "headers", "said"),
    [
        ({"session_id": "s"}, {}, {"conversation": "s", "linear": True}),
        ({}, {"X-Dynamo-Session-ID": "d"}, {"conversation": "d", "linear": True}),
        (
            {},
            {
                "x-dynamo-session-id": "d",
                "x-dynamo-parent-session-id": "up",
                "x-dynamo-session-final": "True",
            },
            {"conversation": "d", "linear": True, "over": True},
        ),
        (
            {"nvext": {"agent_context": {"session_id": "n", "parent_session_id": "up"}}},
            {},
            {"conversation": "n", "linear": True},
        ),
        ({}, {"x-claude-code-session-id": "cc"}, {"conversation": "cc", "linear": True}),
        (
            {},
            {"x-claude-code-session-id": "cc", "x-claude-code-agent-id": "a1"},
            {"conversation": "cc/a1", "linear": True},
        ),
        (
            {},
            {
                "x-claude-code-session-id": "cc",
                "x-claude-code-agent-id": "a2",
                "x-claude-code-parent-agent-id": "a1",
            },
            {"conversation": "cc/a2", "linear": True},
        ),
        (
            {},
            {"x-session-id": "x", "x-parent-session-id": "up"},
            {"conversation": "x", "linear": True},
        ),
        (
            {},
            {"thread-id": "t", "x-codex-parent-thread-id": "t0"},
            {"conversation": "t", "linear": True},
        ),
        ({}, {"x-override-conversation-id": "o"}, {"conversation": "o", "linear": True}),
        ({"rid": "conv_t2"}, {}, {"conversation": "conv", "linear": True, "turn": 2}),
        ({}, {"x-request-id": "c-9-turn12"}, {"conversation": "c-9", "linear": True, "turn": 12}),
        (
            {"metadata": {"user_id": "user_1f_account_2e_session_0b-4c"}},
            {},
            {"conversation": "0b-4c", "linear": True},
        ),
        ({"prompt_cache_key": "k"}, {}, {"conversation": "k"}),
        ({}, {"x-smg-routing-key": "r"}, {"conversation": "r"}),
        ({"safety_identifier": "i"}, {}, {"conversation": "i"}),
        ({"user": "u"}, {}, {"conversation": "u"}),
        ({"user": "u", "prompt_cache_key": "k"}, {"x-session-id": "x"}, {"conversation": "x"}),
        ({"rid": "no-lineage"}, {"x-request-id": "7"}, {}),
        ({}, {}, {}),
    ],
)
def test_each_source_and_the_first_of_several(body, headers, said) -> None:
    found = EVERY.fields(body, http(body, headers).headers)
    assert said.items() <= found.items()
    if "linear" not in said and said != {"conversation": "x"}:
        assert "linear" not in found


def test_each_source_is_in_the_list_once_and_named_in_the_flag() -> None:
    names = [source.name for source in SOURCES]
    assert len(names) == len(set(names))
    assert sources_of("all") == tuple(names)
    assert set(sources_of("sessions")) < set(names)
    assert sources_of("none") == ()
    assert sources_of("user, session_id") == ("session_id", "user")
    with pytest.raises(CanopyError, match="unknown source 'cookie'"):
        sources_of("session_id,cookie")


def test_untrusted_fields_are_not_read() -> None:
    assert "conversation" not in Identities(()).fields({"session_id": "s"}, {})
    only = Identities(sources_of("user"))
    assert only.fields({"session_id": "s", "user": "u"}, {}) == {"conversation": "u"}
    by_default = Identities()
    assert by_default.fields({"user": "u", "prompt_cache_key": "k"}, {}) == {}
    assert by_default.fields({"session_id": "s"}, {}) == {"conversation": "s", "linear": True}


def test_the_entry_reads_fields_that_sglangs_models_drop() -> None:
    assert stamped({"session_id": "s", "x": "y" * 9})["conversation"] == "s"
    assert stamped({"rid": "c_t3"})["turn"] == 3
    assert "conversation" not in stamped({"model": "m"})


def test_canopy_conversation_overrides_all_other_names() -> None:
    own = SimpleNamespace(sampling_params={"custom_params": {"canopy_conversation": "mine"}})
    headers = {"x-dynamo-session-id": "d", "x-dynamo-session-final": "true"}
    entry.stamp(own, {}, http({}, headers))
    stamp = own.sampling_params["custom_params"][STAMP_KEY]
    assert stamp["conversation"] == "mine"
    assert not {"over", "linear"} & stamp.keys()


def test_a_chain_of_responses_is_one_conversation_of_its_tenant() -> None:
    def asks(rid: str, previous: str | None = None, salt: str | None = None) -> dict[str, Any]:
        body = {"input": "hi"} | ({"previous_response_id": previous} if previous else {})
        return stamped(body, rid=rid, cache_salt=salt)

    assert "conversation" not in asks("resp_1")
    assert [asks("resp_2", "resp_1")[k] for k in ("conversation", "turn")] == ["resp_1", 2]
    assert [asks("resp_3", "resp_2")[k] for k in ("conversation", "turn")] == ["resp_1", 3]
    assert asks("resp_4", "resp_3", salt="b")["conversation"] == "resp_3"
    assert asks("resp_5", "unknown")["conversation"] == "unknown"


def test_remembered_responses_are_bounded_and_one_tenants_push_out_no_others() -> None:
    responses = Responses()
    responses.continued("quiet", "resp_q", "root", 1)
    for n in range(5 * MAX_RESPONSES):
        responses.continued("loud", f"resp_{n}", None, 1)
    assert sum(map(len, responses._known.values())) == MAX_RESPONSES + 1
    assert responses.continued("quiet", "resp_r", "resp_q", 1) == ("root", 2)
    for n in range(5 * MAX_TENANTS):
        responses.continued(f"t{n}", "resp_1", None, 1)
    assert len(responses._known) == MAX_TENANTS


def test_names_that_are_too_long_become_their_digest_and_stay_apart() -> None:
    one, other = ("x" * 5000 + end for end in "ab")
    names = {EVERY.fields({"session_id": n}, {})["conversation"] for n in (one, other)}
    assert len(names) == 2
    assert all(len(name) <= 128 for name in names)


@pytest.mark.parametrize("body", [b"", b"not json", b"[1]", b'"text"', b"\xff"])
def test_a_body_that_is_not_an_object_implies_nothing(body: bytes) -> None:
    assert body_of(http(body)) == {}
    assert body_of(None) == {}
    assert body_of(SimpleNamespace(headers={})) == {}


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=9), inner),
    max_leaves=6,
)
KEYS = st.sampled_from(
    ["session_id", "rid", "nvext", "metadata", "user", "previous_response_id", "prompt_cache_key"]
)
CONTEXT = st.fixed_dictionaries({"agent_context": JSON | st.dictionaries(st.text(), JSON)})


@given(st.dictionaries(KEYS, JSON | CONTEXT), st.text(), st.text())
def test_every_stamp_survives_serialisation_to_the_scheduler(body, session, agent) -> None:
    headers = {"x-claude-code-session-id": session, "x-claude-code-agent-id": agent}
    fields = EVERY.fields(body, headers, "resp_1")
    stamp = make_stamp({}, fields, 5.0)
    assert read_stamp({STAMP_KEY: stamp}) == stamp
    request = live_request(stamped_req(stamp), 0.0, 16)
    assert (request.time, request.conversation) == (5.0, fields.get("conversation"))
