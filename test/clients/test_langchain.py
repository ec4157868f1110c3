"""The callback in LangChain and LangGraph, as they run."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from support.chat_endpoint import calls, chat_endpoint, says

reason = "pip install langchain-openai langgraph"
langchain_openai = pytest.importorskip("langchain_openai", reason=reason)
prebuilt = pytest.importorskip("langgraph.prebuilt", reason=reason)

from langgraph.checkpoint.memory import MemorySaver  # noqa: E402

from sglang_canopy.clients.http import async_http_client, http_client  # noqa: E402
from sglang_canopy.clients.langchain_callback import CanopyCallback  # noqa: E402
from sglang_canopy.clients.session import current  # noqa: E402
from sglang_canopy.clients.tool_times import ToolTimes  # noqa: E402


def search() -> str:
    """Look it up."""
    return "found"


def agent(url: str, **options: Any) -> Any:
    model = langchain_openai.ChatOpenAI(
        model="m",
        base_url=f"{url}/v1",
        api_key="none",
        http_client=http_client(),
        http_async_client=async_http_client(),
    )
    return prebuilt.create_react_agent(model, [search], **options)


TASK = {"messages": [("user", "Which leaf goes first?")]}


@pytest.mark.parametrize("how", ["invoke", "ainvoke", "stream", "astream"])
def test_a_run_of_an_agent_is_a_session(how: str) -> None:
    with chat_endpoint([calls("search"), calls("search"), says("the last")]) as (url, sent):
        hints = CanopyCallback(url, tool_times=ToolTimes())
        made, config = agent(url), {"callbacks": [hints]}

        async def streamed() -> None:
            async for _ in made.astream(TASK, config):
                pass

        if how == "invoke":
            made.invoke(TASK, config)
        elif how == "ainvoke":
            asyncio.run(made.ainvoke(TASK, config))
        elif how == "stream":
            list(made.stream(TASK, config))
        else:
            asyncio.run(streamed())
        assert current() is None
        hints.last.wait()
        names = {fields["canopy_conversation"] for fields in sent.fields}
        assert len(sent.fields) == 3
        assert len(names) == 1
        # The first call's pause taught how long it takes; the second was announced.
        assert [set(h) - {"conversation"} for h in sent.hints] == [{"return_in_s"}, {"over"}]


def test_a_thread_that_goes_on_keeps_its_name() -> None:
    with chat_endpoint([]) as (url, sent):
        hints = CanopyCallback(url, ends=False)
        made = agent(url, checkpointer=MemorySaver())
        for _ in range(2):
            made.invoke(TASK, {"callbacks": [hints], "configurable": {"thread_id": "t-7"}})
        assert [fields["canopy_conversation"] for fields in sent.fields] == ["t-7", "t-7"]
        assert sent.hints == []


def test_a_run_that_fails_ends_its_session() -> None:
    with chat_endpoint([]) as (url, sent):
        hints = CanopyCallback(url)
        made = agent(f"{url}/nowhere")
        with pytest.raises(langchain_openai.chat_models.base.openai.APIError):
            made.invoke(TASK, {"callbacks": [hints], "recursion_limit": 3})
        hints.last.wait()
        assert current() is None
        assert [set(h) for h in sent.hints] == [{"conversation", "over"}]
