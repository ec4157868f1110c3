"""What a session makes known, with OpenAI's own client."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest

from sglang_canopy.clients.session import Session, current
from sglang_canopy.clients.tool_times import MAX_TOOLS, PAUSES, ToolTimes
from sglang_canopy.wire.hints import hint_of
from sglang_canopy.wire.stamp import client_fields
from support.chat_endpoint import Sent, calls, chat_endpoint, says

openai = pytest.importorskip("openai")

from sglang_canopy.clients.http import async_http_client, http_client  # noqa: E402

ASK = [{"role": "user", "content": "Which leaf goes first?"}]


def client(url: str) -> Any:
    return openai.OpenAI(base_url=f"{url}/v1", api_key="none", http_client=http_client())


def ask(of: Any, **options: Any) -> Any:
    return of.chat.completions.create(model="m", messages=ASK, **options)


def test_requests_of_a_session_name_it_and_its_end_is_told() -> None:
    with chat_endpoint([]) as (url, sent):
        with Session(url, "s-1") as session:
            assert ask(client(url)).choices[0].message.content == "done"
            ask(client(url))
        session.wait()
        assert [client_fields(fields) for fields in sent.fields] == [{"conversation": "s-1"}] * 2
        assert [hint_of(hint, 0.0)["over"] for hint in sent.hints] == [True]


def test_outside_a_session_nothing_is_added() -> None:
    with chat_endpoint([]) as (url, sent):
        ask(client(url))
        assert sent.fields == [{}]
        assert sent.hints == []


@pytest.mark.parametrize("stream", [False, True])
def test_a_tool_is_announced_once_it_is_known_how_long_it_takes(stream: bool) -> None:
    times = ToolTimes()
    with chat_endpoint([calls("search"), calls("search", "clock"), calls("search")]) as (url, sent):
        with Session(url, tool_times=times) as session:
            of = client(url)
            for expected in (0, 0, 1):  # unknown; ``clock`` is unknown; known
                answer = ask(of, stream=stream)
                if stream:
                    list(answer)
                session.wait()
                assert len(sent.hints) == expected
        session.wait()
    told = hint_of(sent.hints[0], 0.0)
    assert told["conversation"] == session.name
    assert told["return_in_s"] == pytest.approx(times.expected_s(["search"]))


def test_an_answer_without_tools_announces_nothing() -> None:
    with chat_endpoint([calls("search"), says("well")]) as (url, sent):
        with Session(url, tool_times=ToolTimes()) as session:
            ask(client(url))
            ask(client(url))
        session.wait()
        assert [set(hint) for hint in sent.hints] == [{"conversation", "over"}]


def test_what_the_client_writes_itself_wins() -> None:
    with chat_endpoint([]) as (url, sent):
        with Session(url, "s-1"):
            mine = {"canopy_category": "mine", "canopy_conversation": "c-2"}
            ask(client(url), extra_body={"custom_params": mine})
        assert sent.fields == [mine]


def test_an_inner_session_is_one_that_the_outer_waits_for() -> None:
    with chat_endpoint([]) as (url, sent):
        with Session(url, "main"):
            with Session(url, "sub"):
                ask(client(url))
            ask(client(url))
        assert sent.fields == [
            {"canopy_conversation": "sub", "canopy_parent": "main"},
            {"canopy_conversation": "main"},
        ]


def test_tasks_side_by_side_keep_their_sessions_apart() -> None:
    async def task(url: str, name: str) -> None:
        of = openai.AsyncOpenAI(
            base_url=f"{url}/v1", api_key="none", http_client=async_http_client()
        )
        with Session(url, name):
            for stream in (False, True):
                messages = [{"role": "user", "content": name}]
                answer = await of.chat.completions.create(
                    model="m", messages=messages, stream=stream
                )
                if stream:
                    assert [part async for part in answer]
        await of.close()

    async def both(url: str) -> None:
        await asyncio.gather(task(url, "a"), task(url, "b"))

    with chat_endpoint([]) as (url, sent):
        asyncio.run(both(url))
        asked = [body for path, body in sent.requests if path[:3] == "/v1"]
    named = [(body["messages"][0]["content"], body["custom_params"]) for body in asked]
    assert sorted(name for name, _ in named) == ["a", "a", "b", "b"]
    assert all(fields["canopy_conversation"] == name for name, fields in named)
    assert current() is None


def test_a_server_that_takes_no_hints_costs_the_agent_nothing(caplog) -> None:
    with chat_endpoint([]) as (url, _):
        pass  # nobody listens there any more
    with caplog.at_level(logging.WARNING), Session(url) as session:
        pass
    session.wait()
    assert "did not take a hint" in caplog.text


def test_a_tenant_and_a_key_go_with_each_hint() -> None:
    with chat_endpoint([]) as (url, sent):
        with Session(f"{url}/v1", "s-1", tenant={"cache_salt": "ann"}) as session:
            pass
        session.wait()
        assert sent.hints == [{"cache_salt": "ann", "conversation": "s-1", "over": True}]


def test_hints_carry_the_key_of_the_agents_own_requests_to_that_server(monkeypatch) -> None:
    with chat_endpoint([]) as (url, sent), chat_endpoint([]) as (other, others):
        for base in (url, other):
            client = openai.OpenAI(base_url=f"{base}/v1", api_key="k1", http_client=http_client())
            with Session(url, "s-1") as session:
                client.chat.completions.create(
                    model="m", messages=[{"role": "user", "content": ""}]
                )
            session.wait()
        assert sent.keys == ["Bearer k1", None], "a key goes to no other server"
        assert others.keys == []
        monkeypatch.setenv("CANOPY_API_KEY", "k2")
        for headers in ({}, {"Authorization": "Bearer k3"}):
            session = Session(url, "s-1", headers=headers)
            session.use_key_of(url, "Bearer k1")
            session.over()
            session.wait()
        assert sent.keys[2:] == ["Bearer k2", "Bearer k3"]


def test_tool_times_are_medians_of_the_last_pauses_and_bounded() -> None:
    times = ToolTimes()
    assert times.expected_s([]) is None
    for seconds in [100.0] * PAUSES + [1.0] * PAUSES:
        times.took(["search"], seconds)
    times.took(["clock"], 3.0)
    assert times.expected_s(["search"]) == 1.0
    assert times.expected_s(["search", "clock"]) == 3.0
    assert times.expected_s(["search", "new"]) is None
    for i in range(MAX_TOOLS):
        times.took([f"t{i}"], 1.0)
    assert times.expected_s(["search"]) is None


def test_an_answer_cut_short_or_of_another_shape_calls_nothing() -> None:
    from sglang_canopy.clients.called import tools_called

    assert tools_called(b'{"choices": [{"message": {"tool_ca') == ()
    assert tools_called(b'{"choices": 3}') == tools_called(b"[1]") == tools_called(b"") == ()
    assert Sent().hints == []
