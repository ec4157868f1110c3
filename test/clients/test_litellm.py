"""LiteLLM: its SDK inside a session, and the callback of its proxy."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from support.chat_endpoint import calls, chat_endpoint, says

litellm = pytest.importorskip("litellm", reason="pip install litellm")

from litellm.litellm_core_utils.logging_worker import GLOBAL_LOGGING_WORKER  # noqa: E402

from sglang_canopy.clients.http import http_client  # noqa: E402
from sglang_canopy.clients.litellm_proxy import CanopyLogger  # noqa: E402
from sglang_canopy.clients.session import Session  # noqa: E402
from sglang_canopy.clients.tool_times import ToolTimes  # noqa: E402

ASK = [{"role": "user", "content": "Which leaf goes first?"}]


def test_the_sdk_in_a_session(monkeypatch) -> None:
    monkeypatch.setattr(litellm, "client_session", http_client())
    with chat_endpoint([calls("search"), calls("search"), says("the last")]) as (url, sent):
        with Session(url, "s-1", tool_times=ToolTimes()) as session:
            for _ in range(3):
                litellm.completion(
                    model="openai/m", api_base=f"{url}/v1", api_key="none", messages=ASK
                )
        session.wait()
        assert sent.fields == [{"canopy_conversation": "s-1"}] * 3
        assert [set(h) - {"conversation"} for h in sent.hints] == [{"return_in_s"}, {"over"}]


@pytest.mark.parametrize("stream", [False, True])
def test_the_proxy_names_sessions_and_announces_tools(stream: bool, monkeypatch) -> None:
    """The hooks in the order of the proxy, around LiteLLM's own call."""

    class Key:
        api_key = "hash-of-a-key"

    async def run(url: str) -> CanopyLogger:
        hints = CanopyLogger(url, tool_times=ToolTimes())
        monkeypatch.setattr(litellm, "callbacks", [hints])
        for _ in range(3):
            data: dict[str, Any] = {
                "model": "openai/m",
                "messages": ASK,
                "stream": stream,
                "metadata": {"session_id": "s-1"},
            }
            data = await hints.async_pre_call_hook(Key(), None, data, "completion")
            answer = await litellm.acompletion(api_base=f"{url}/v1", api_key="none", **data)
            if stream:
                assert [part async for part in answer]
            await GLOBAL_LOGGING_WORKER.flush()
        return hints

    with chat_endpoint([calls("search"), calls("search"), says("the last")]) as (url, sent):
        hints = asyncio.run(run(url))
        for session in hints.sessions:
            session.wait()
        names = {fields["canopy_conversation"] for fields in sent.fields}
        assert len(sent.fields) == 3
        assert len(names) == 1
        assert names == {"s-1"}, "as its user explains it"
        assert [set(h) - {"conversation"} for h in sent.hints] == [{"return_in_s"}]


def test_a_name_that_two_keys_use_is_the_first_ones() -> None:
    hints = CanopyLogger("http://127.0.0.1:1")

    def named(key: str, name: str) -> str:
        data = {"model": "m", "messages": ASK, "metadata": {"session_id": name}}
        owner = SimpleNamespace(api_key=key)
        made = asyncio.run(hints.async_pre_call_hook(owner, None, data, "completion"))
        return made["extra_body"]["custom_params"]["canopy_conversation"]

    assert named("ann", "s-1") == named("ann", "s-1") == "s-1"
    assert named("bob", "s-1") == named("bob", "s-1") != "s-1"
    assert named("ann", "s\n1") != "s\n1", "the server takes printable names"


def test_the_documented_callback_sends_the_key_of_its_environment(monkeypatch) -> None:
    monkeypatch.setenv("CANOPY_API_KEY", "k1")
    with chat_endpoint([]) as (url, sent):
        session = CanopyLogger(url)._session("s-1")
        session.over()
        session.wait()
        assert sent.keys == ["Bearer k1"]


def test_requests_without_a_session_are_left_alone() -> None:
    hints = CanopyLogger("http://127.0.0.1:1")
    data: dict[str, Any] = {"model": "m", "messages": ASK}
    assert asyncio.run(hints.async_pre_call_hook(None, None, dict(data), "completion")) == data
    named = {**data, "metadata": {"session_id": "s-1"}}
    assert asyncio.run(hints.async_pre_call_hook(None, None, named, "embeddings")) == named
