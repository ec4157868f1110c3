"""``examples/canopy_session.py`` with OpenAI's client."""

import asyncio
from typing import Any

import httpx
import pytest

from sglang_canopy.wire.hints import hint_of
from sglang_canopy.wire.stamp import client_fields
from support.chat_endpoint import assistant_calls, chat_endpoint
from support.example_files import load_example

openai = pytest.importorskip("openai")

MESSAGES = [{"role": "user", "content": "Which leaf goes first?"}]


@pytest.fixture
def example(monkeypatch) -> Any:
    for name in ("CANOPY_API_KEY", "CANOPY_GATEWAY_SECRET"):
        monkeypatch.delenv(name, raising=False)
    return load_example("canopy_session")


def new_client(example: Any, url: str, key: str = "none") -> Any:
    return openai.OpenAI(
        base_url=f"{url}/v1",
        api_key=key,
        http_client=httpx.Client(transport=example.Hints(), timeout=None),
    )


def send(client: Any, **options: Any) -> Any:
    return client.chat.completions.create(model="m", messages=MESSAGES, **options)


def test_requests_of_a_session_name_it_and_its_end_is_announced(example) -> None:
    with chat_endpoint([]) as (url, received):
        with example.Session(f"{url}/v1", "s-1", tenant={"cache_salt": "ann"}) as session:
            assert send(new_client(example, url)).choices[0].message.content == "done"
            own_params = {"canopy_category": "mine", "canopy_conversation": "c-2"}
            send(new_client(example, url), extra_body={"custom_params": own_params})
        session.last_hint.result()
        send(new_client(example, url))
    assert [client_fields(p) for p in received.custom_params[:1]] == [({"conversation": "s-1"}, {})]
    assert received.custom_params[1:] == [own_params, {}]
    assert received.hints == [{"cache_salt": "ann", "conversation": "s-1", "over": True}]


@pytest.mark.parametrize("stream", [False, True])
def test_a_known_tool_is_announced(stream: bool, example) -> None:
    answers = [assistant_calls(*tools.split()) for tools in ("search", "search clock", "search")]
    with chat_endpoint(answers) as (url, received), example.Session(url) as session:
        client = new_client(example, url)
        for expected_hints in (0, 0, 1):  # unknown; ``clock`` is unknown; known
            answer = send(client, stream=stream)
            if stream:
                list(answer)
            if session.last_hint is not None:
                session.last_hint.result()
            assert len(received.hints) == expected_hints
    hint = hint_of(received.hints[0], 0.0)
    assert hint["conversation"] == session.name
    assert hint["return_in_s"] > 0
    assert not session.tools.difference({"search"})


def test_concurrent_tasks_have_their_own_sessions(example) -> None:
    async def task(url: str, name: str) -> None:
        http = httpx.AsyncClient(transport=example.AsyncHints(), timeout=None)
        client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", http_client=http)
        with example.Session(url, name):
            for stream in (False, True):
                messages = [{"role": "user", "content": name}]
                create = client.chat.completions.create
                answer = await create(model="m", messages=messages, stream=stream)
                if stream:
                    assert [part async for part in answer]
        await client.close()

    async def run_both(url: str) -> None:
        await asyncio.gather(task(url, "a"), task(url, "b"))

    with chat_endpoint([]) as (url, received):
        asyncio.run(run_both(url))
        bodies = [body for path, body in received.requests if path[:3] == "/v1"]
    sent = [(body["messages"][0]["content"], body["custom_params"]) for body in bodies]
    assert sorted(name for name, _ in sent) == ["a", "a", "b", "b"]
    assert all(fields["canopy_conversation"] == name for name, fields in sent)
    assert example.current_session.get() is None


def test_hints_carry_the_key_of_the_agents_own_requests_to_that_server(example, monkeypatch):
    with chat_endpoint([]) as (url, received), chat_endpoint([]) as (other_url, other_received):
        for base_url in (url, other_url):
            with example.Session(url, "s-1") as session:
                send(new_client(example, base_url, "k1"))
            session.last_hint.result()
        assert received.auth_keys == ["Bearer k1", None], "a key goes to no other server"
        assert other_received.auth_keys == []
        monkeypatch.setenv("CANOPY_API_KEY", "k2")
        for headers in ({}, {"Authorization": "Bearer k3"}):
            with example.Session(url, "s-1", headers=headers) as session:
                send(new_client(example, url, "k1"))
            session.last_hint.result()
        assert received.auth_keys[2:] == ["Bearer k2", "Bearer k3"]
