"""Agents at real servers: recognised by their answers, and held by ``--canopy-session-gate``.

Weights are random: SGLang's own ``regex`` gives an answer the format that its tool parser reads."""

import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest

from support.prompts import token_ids
from support.served import TIMEOUT_S, wait_until

TEMPLATE = Path(__file__).parents[2] / "benchmark" / "agents" / "hermes.jinja"
FLAGS = ("--radix-eviction", "auto", "--canopy-session-gate", "auto", "--served-model-name", "m")
FLAGS += ("--chat-template", str(TEMPLATE))
TOOL_PARAMETERS = {"type": "object", "properties": {"at": {"type": "string"}}, "required": ["at"]}
TOOL = {"type": "function", "function": {"name": "look", "parameters": TOOL_PARAMETERS}}
ANSWER_PATTERNS = {
    "hermes": r'<tool_call>\n\{"name": "look", "arguments": \{"at": "[a-z]{4}"\}\}\n</tool_call>',
    "qwen3_coder": r"<tool_call>\n<function=look>\n<parameter=at>\n[a-z]{4}\n</parameter>\n"
    r"</function>\n</tool_call>",
}
"""Regular expressions of an answer, by ``--tool-call-parser``; test_tool_calls.py has the other parsers'."""


def recognised_agents(client: Any) -> int:
    return client.rank()["agents"]["recognised"]


@pytest.mark.long
@pytest.mark.parametrize("parser", ANSWER_PATTERNS)
def test_an_agent_is_recognised_by_its_answer(launch, small_model, parser: str) -> None:
    words = random.Random(1).choices(("oak", "ash", "elm", "fir", "box"), k=200)
    messages: list[Any] = [{"role": "user", "content": " ".join(words)}]
    with launch(small_model, *FLAGS, "--tool-call-parser", parser, kv_tokens=2048) as client:
        api = openai.OpenAI(base_url=f"{client.url}/v1", api_key="none", max_retries=0)
        for turn in (1, 2):
            answer = api.chat.completions.create(
                model="m", messages=messages, temperature=0, max_tokens=64, tools=[TOOL],
                extra_body={"regex": ANSWER_PATTERNS[parser]},
            )  # fmt: skip
            message = answer.choices[0].message
            assert [call.function.name for call in message.tool_calls] == ["look"]
            wait_until(lambda turn=turn: recognised_agents(client) == turn)
            result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "an oak"}
            messages += [message.model_dump(exclude_none=True), result]


GATE_FLAGS = ("--radix-eviction", "canopy-lru", "--canopy-session-gate", "auto", "--enable-metrics")
PROMPT_TOKENS = 900
THRASHING_AGENTS, SMALL_PROMPT_TOKENS = 8, 400
"""Agents, and tokens of each one's prompt. About five fit, so that holding some saves recomputation."""
AGENT = {"canopy_category": "agent", "canopy_stop": "tool"}


def send_turn(client: Any, name: str, prompt: list[int], **body: Any) -> dict[str, Any]:
    return client.generate(prompt, 4, {**AGENT, "canopy_conversation": name}, **body)


def end_conversation(client: Any, name: str) -> None:
    client.post("/canopy/hint", {"conversation": name, "over": True})


def gate(client: Any) -> dict[str, Any]:
    return client.rank()["session_gate"]


def wait_until_held(client: Any, sessions: int) -> None:
    """Wait until the gate holds ``sessions`` sessions."""
    wait_until(lambda: gate(client)["waiting_sessions"] == sessions)


def fill_device(client: Any) -> str:
    """Let agents evict each other until the gate is active, and end them; then let two fill the device.
    Return the answer that session ``c`` gets alone, from before."""
    answer_alone = send_turn(client, "alone", token_ids(PROMPT_TOKENS, 2))["text"]
    end_conversation(client, "alone")
    client.flush()
    is_gate_active = threading.Event()

    def run_agent(number: int) -> None:
        while not is_gate_active.is_set():
            send_turn(client, f"thrashing {number}", token_ids(SMALL_PROMPT_TOKENS, 10 + number))

    with ThreadPoolExecutor(THRASHING_AGENTS) as pool:
        agents = [pool.submit(run_agent, number) for number in range(THRASHING_AGENTS)]
        try:
            wait_until(lambda: (state := gate(client))["active"] and state["pauses"], 8 * TIMEOUT_S)
        finally:
            is_gate_active.set()
            while not all(finished_agent.done() for finished_agent in agents):
                for number in range(THRASHING_AGENTS):
                    end_conversation(client, f"thrashing {number}")
                time.sleep(0.1)
        for finished_agent in agents:
            finished_agent.result()
    for seed, name in enumerate("ab"):
        send_turn(client, name, token_ids(PROMPT_TOKENS, seed))
    return answer_alone


def work(client: Any, name: str, seed: int, is_over: threading.Event) -> int:
    """Send turns of a session until ``is_over``, since a silent one is charged less and less. Return the fewest
    cached tokens of a turn."""
    prompt, fewest_tokens = token_ids(PROMPT_TOKENS, seed) + token_ids(9, 20), 2 * PROMPT_TOKENS
    while not is_over.is_set():
        meta_info = send_turn(client, name, prompt)["meta_info"]
        fewest_tokens = min(fewest_tokens, meta_info["cached_tokens"])
    return fewest_tokens


@pytest.mark.long
def test_a_new_session_waits_for_room_and_its_answer_is_unchanged(launch, smollm2) -> None:
    with launch(smollm2, *GATE_FLAGS, kv_tokens=2048) as client, ThreadPoolExecutor(4) as pool:
        answer_alone = fill_device(client)
        delayed_before = gate(client)["delayed_sessions"]
        over = {name: threading.Event() for name in "abc"}
        cached_tokens = {n: pool.submit(work, client, n, i, over[n]) for i, n in enumerate("ab")}
        try:
            third_answer = pool.submit(send_turn, client, "c", token_ids(PROMPT_TOKENS, 2))
            wait_until_held(client, 1)
            time.sleep(2.0)
            assert not third_answer.done()
            client.get("/health")
            over["b"].set()
            assert cached_tokens["b"].result() >= PROMPT_TOKENS
            end_conversation(client, "b")
            assert third_answer.result()["text"] == answer_alone
            wait_until(lambda: gate(client)["delayed_sessions"] == delayed_before + 1)
            wait_until_held(client, 0)
            pool.submit(work, client, "c", 2, over["c"])
            assert "canopy:gate_delayed_sessions_total" in client.get("/metrics")
            # Requests aborted while they wait leave no state behind.
            for rid in ("gone", ""):
                params = {**AGENT, "canopy_conversation": f"d{rid}"}
                sampling_params = {"max_new_tokens": 4, "custom_params": params}
                body = {
                    "input_ids": token_ids(PROMPT_TOKENS, 3),
                    "sampling_params": sampling_params,
                }
                body |= {"rid": rid} if rid else {}
                aborted = pool.submit(client.send, "/generate", body)
                wait_until_held(client, 1)
                if not rid:  # all requests are aborted
                    over["a"].set()
                    over["c"].set()
                client.post("/abort_request", {"rid": rid, "abort_all": not rid})
                aborted.result()
                wait_until_held(client, 0)
        finally:
            for is_over in over.values():
                is_over.set()
        assert cached_tokens["a"].result() >= PROMPT_TOKENS
        time.sleep(2.0)
        wait_until(lambda: gate(client)["clock_ago_s"] < 3.0)  # ticks arrive without requests
        assert gate(client)["footprint_tokens"] < 3 * PROMPT_TOKENS
        assert "Traceback" not in client.server.log_text()
