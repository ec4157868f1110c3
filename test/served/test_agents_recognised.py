"""Agents that use the official ``openai`` client are recognised under four tool parsers; without one, the reason is stated.

Weights are random: SGLang's own ``regex`` gives an answer the form that its tool parser reads.
"""

import random
import time
from pathlib import Path
from typing import Any

import openai
import pytest

from sglang_canopy.admission.agents import SWIFT_S
from support.served import until

TEMPLATE = Path(__file__).parents[2] / "benchmark" / "agents" / "hermes.jinja"
FLAGS = ("--radix-eviction", "auto", "--canopy-session-gate", "auto", "--served-model-name", "m")
FLAGS += ("--chat-template", str(TEMPLATE))
PARAMETERS = {"type": "object", "properties": {"at": {"type": "string"}}, "required": ["at"]}
TOOL = {"type": "function", "function": {"name": "look", "parameters": PARAMETERS}}
CALL = r'\{"name": "look", "arguments": \{"at": "[a-z]{4}"\}\}'
CALLS = {
    "hermes": rf"<tool_call>\n{CALL}\n</tool_call>",
    "qwen3_coder": r"<tool_call>\n<function=look>\n<parameter=at>\n[a-z]{4}\n</parameter>\n"
    r"</function>\n</tool_call>",
    "pythonic": r'\[look\(at="[a-z]{4}"\)\]',
    "mistral": rf"\[TOOL_CALLS\] \[{CALL}\]",
}
"""An answer's form by ``--tool-call-parser``."""


def ask(client: Any, messages: list[Any], form: str, **fields: Any) -> Any:
    official = openai.OpenAI(base_url=f"{client.url}/v1", api_key="none", max_retries=0)
    answer = official.chat.completions.create(
        model="m", messages=messages, temperature=0, max_tokens=64, extra_body={"regex": form}, **fields
    )  # fmt: skip
    return answer.choices[0].message


def trees(count: int, seed: int) -> str:
    return " ".join(random.Random(seed).choices(("oak", "ash", "elm", "fir", "box"), k=count))


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def recognised(client: Any) -> int:
    return client.rank()["agents"]["recognised"]


@pytest.mark.long
@pytest.mark.parametrize("parser", CALLS)
def test_an_agent_is_recognised_by_its_answer(server, small_model, parser: str) -> None:
    flags = (*FLAGS, "--tool-call-parser", parser)
    with server(small_model, *flags, kv_tokens=2048) as client:
        messages = [user(trees(200, 1))]
        called = ask(client, messages, CALLS[parser], tools=[TOOL])
        assert [one.function.name for one in called.tool_calls] == ["look"]
        until(lambda: recognised(client) == 1)
        result = {"role": "tool", "tool_call_id": called.tool_calls[0].id, "content": "an oak"}
        messages += [called.model_dump(exclude_none=True), result]
        assert ask(client, messages, CALLS[parser], tools=[TOOL]).tool_calls
        until(lambda: recognised(client) == 2)


@pytest.mark.long
def test_without_a_parser_the_reason_is_stated(server, small_model) -> None:
    with server(small_model, *FLAGS, kv_tokens=2048) as client:
        prompts = [[user(trees(900, seed))] for seed in range(4)]
        for messages in prompts:
            ask(client, messages, "[a-z]{4}")
        time.sleep(SWIFT_S)  # longer than an agent's pause
        for messages in prompts:  # the KV of the first ones is evicted
            ask(client, messages, "[a-z]{4}")
        line = until(lambda: (said := client.rank()["auto"]) and "no agents" in said and said)
        assert "no agents recognised: no --tool-call-parser, no turn has returned yet" in line
