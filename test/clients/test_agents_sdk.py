"""OpenAI's Agents SDK inside a session."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support.chat_endpoint import calls, chat_endpoint, says

openai = pytest.importorskip("openai")

from sglang_canopy.clients.http import async_http_client  # noqa: E402
from sglang_canopy.clients.session import Session  # noqa: E402
from sglang_canopy.clients.tool_times import ToolTimes  # noqa: E402


@pytest.fixture(scope="module")
def agents() -> Iterator[Any]:
    """The SDK. Its module is called like one of ``scripts``, which other tests import."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", [p for p in sys.path if not Path(p, "agents.py").is_file()])
        patch.delitem(sys.modules, "agents", raising=False)
        yield pytest.importorskip("agents", reason="pip install openai-agents")
        sys.modules.pop("agents", None)


@pytest.mark.parametrize("streamed", [False, True])
def test_a_run_is_a_session(streamed: bool, agents) -> None:
    agents.set_tracing_disabled(True)

    @agents.function_tool
    def search() -> str:
        """Look it up."""
        return "found"

    async def run(url: str, session: Session) -> str:
        client = openai.AsyncOpenAI(
            base_url=f"{url}/v1", api_key="none", http_client=async_http_client()
        )
        model = agents.OpenAIChatCompletionsModel("m", client)
        agent = agents.Agent("a", instructions="Use the tool.", tools=[search], model=model)
        with session:
            if not streamed:
                return str((await agents.Runner.run(agent, "Which leaf?")).final_output)
            result = agents.Runner.run_streamed(agent, "Which leaf?")
            async for _ in result.stream_events():
                pass
            return str(result.final_output)

    with chat_endpoint([calls("search"), calls("search"), says("the last")]) as (url, sent):
        session = Session(url, "s-1", tool_times=ToolTimes())
        assert asyncio.run(run(url, session)) == "the last"
        session.wait()
        assert sent.fields == [{"canopy_conversation": "s-1"}] * 3
        assert [set(h) - {"conversation"} for h in sent.hints] == [{"return_in_s"}, {"over"}]
