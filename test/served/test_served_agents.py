"""Agents at real servers: recognised by their answers, and held back by ``--canopy-session-gate``.

Weights are random: SGLang's own ``regex`` gives an answer the form that its tool parser reads.
"""

import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest

from support.prompts import token_ids
from support.served import PATIENCE_S, until

TEMPLATE = Path(__file__).parents[2] / "benchmark" / "agents" / "hermes.jinja"
FLAGS = ("--radix-eviction", "auto", "--canopy-session-gate", "auto", "--served-model-name", "m")
FLAGS += ("--chat-template", str(TEMPLATE))
PARAMETERS = {"type": "object", "properties": {"at": {"type": "string"}}, "required": ["at"]}
TOOL = {"type": "function", "function": {"name": "look", "parameters": PARAMETERS}}
FORMS = {
    "hermes": r'<tool_call>\n\{"name": "look", "arguments": \{"at": "[a-z]{4}"\}\}\n</tool_call>',
    "qwen3_coder": r"<tool_call>\n<function=look>\n<parameter=at>\n[a-z]{4}\n</parameter>\n"
    r"</function>\n</tool_call>",
}
"""An answer's form by ``--tool-call-parser``; test_tool_calls.py has the other parsers'."""


def recognised(client: Any) -> int:
    return client.rank()["agents"]["recognised"]


@pytest.mark.long
@pytest.mark.parametrize("parser", FORMS)
def test_an_agent_is_recognised_by_its_answer(server, small_model, parser: str) -> None:
    trees = random.Random(1).choices(("oak", "ash", "elm", "fir", "box"), k=200)
    messages: list[Any] = [{"role": "user", "content": " ".join(trees)}]
    with server(small_model, *FLAGS, "--tool-call-parser", parser, kv_tokens=2048) as client:
        api = openai.OpenAI(base_url=f"{client.url}/v1", api_key="none", max_retries=0)
        for turn in (1, 2):
            answer = api.chat.completions.create(
                model="m", messages=messages, temperature=0, max_tokens=64, tools=[TOOL],
                extra_body={"regex": FORMS[parser]},
            )  # fmt: skip
            called = answer.choices[0].message
            assert [call.function.name for call in called.tool_calls] == ["look"]
            until(lambda turn=turn: recognised(client) == turn)
            result = {"role": "tool", "tool_call_id": called.tool_calls[0].id, "content": "an oak"}
            messages += [called.model_dump(exclude_none=True), result]


GATED = ("--radix-eviction", "canopy-lru", "--canopy-session-gate", "auto", "--enable-metrics")
PROMPT = 900
THRASHING, SMALL = 8, 400
"""Agents, each with a prompt of so many tokens: some five fit, so that waiting saves enough."""
AGENT = {"canopy_category": "agent", "canopy_stop": "tool"}


def turn(client: Any, name: str, prompt: list[int], **body: Any) -> dict[str, Any]:
    return client.generate(prompt, 4, {**AGENT, "canopy_conversation": name}, **body)


def end(client: Any, name: str) -> None:
    client.post("/canopy/hint", {"conversation": name, "over": True})


def gate(client: Any) -> dict[str, Any]:
    return client.rank()["session_gate"]


def waits(client: Any, sessions: int) -> None:
    """Wait until so many sessions are held back."""
    until(lambda: gate(client)["waiting_sessions"] == sessions)


def fill(client: Any) -> str:
    """Agents evict each other until the gate arms, and leave; then two take all memory. Returns the
    answer of session ``c`` alone, taken before."""
    alone = turn(client, "alone", token_ids(PROMPT, 2))["text"]
    end(client, "alone")
    client.flush()
    armed = threading.Event()

    def agent(number: int) -> None:
        while not armed.is_set():
            turn(client, f"thrashing {number}", token_ids(SMALL, 10 + number))

    with ThreadPoolExecutor(THRASHING) as pool:
        agents = [pool.submit(agent, number) for number in range(THRASHING)]
        try:
            until(lambda: (status := gate(client))["active"] and status["pauses"], 2 * PATIENCE_S)
        finally:
            armed.set()
            while not all(running.done() for running in agents):
                for number in range(THRASHING):
                    end(client, f"thrashing {number}")
                time.sleep(0.1)
        for running in agents:
            running.result()
    for seed, name in enumerate("ab"):
        turn(client, name, token_ids(PROMPT, seed))
    return alone


@pytest.mark.long
def test_a_new_session_waits_for_room_and_its_answer_is_unchanged(server, smollm2) -> None:
    with server(smollm2, *GATED, kv_tokens=2048) as client, ThreadPoolExecutor(1) as pool:
        alone = fill(client)
        delayed = gate(client)["delayed_sessions"]
        third = pool.submit(turn, client, "c", token_ids(PROMPT, 2))
        waits(client, 1)
        longer = token_ids(PROMPT, 0) + token_ids(9, 20)
        assert turn(client, "a", longer)["meta_info"]["cached_tokens"] >= PROMPT
        time.sleep(2.0)
        until(lambda: gate(client)["clock_ago_s"] < 3.0)  # ticks arrive without requests
        assert not third.done()
        client.get("/health")
        end(client, "b")
        assert third.result()["text"] == alone
        until(lambda: gate(client)["delayed_sessions"] == delayed + 1)
        waits(client, 0)
        assert "canopy:gate_delayed_sessions_total" in client.get("/metrics")
        # Requests aborted while they wait leave no state behind.
        for rid in ("gone", ""):
            sampling = {
                "max_new_tokens": 4,
                "custom_params": {**AGENT, "canopy_conversation": f"d{rid}"},
            }
            body = {"input_ids": token_ids(PROMPT, 3), "sampling_params": sampling}
            aborted = pool.submit(client.send, "/generate", body | ({"rid": rid} if rid else {}))
            waits(client, 1)
            client.post("/abort_request", {"rid": rid, "abort_all": not rid})
            aborted.result()
            waits(client, 0)
        assert gate(client)["footprint_tokens"] < 3 * PROMPT
        assert "Traceback" not in client.server.log_text()
