"""Golden rows of a real server on the CPU: each request's cached tokens, and a digest of the answers.

Requests are sent one at a time, so that only the cache decides what is hit. Agents continue their
conversations between single questions; half of the agents send a category, and a hint at the end. The
pool is too small for all: LRU and ``wa`` keep different parts.
"""

from __future__ import annotations

import random
import tempfile
from pathlib import Path
from typing import Any

from paths import digest, model_folder

from launch_server import cpu_arguments, free_port, post, serving

POLICIES = ("canopy-lru", "wa")
KV_TOKENS = 1536
REQUEST_COUNT, ANSWER_TOKENS = 90, 4
AGENT_COUNT, AGENT_TURNS = 6, 5
QUESTION_SHARE = 0.4
"""Share of single questions among the requests."""
POLICY_ARGUMENTS = ("--radix-eviction-policy-config", '{"block_tokens": 16, "quantum_tokens": 16}')
"""Blocks of 16 tokens, since prompts have only a few hundred; the default is 64."""
READY_TIMEOUT_S, ANSWER_TIMEOUT_S = 300.0, 120.0
_WORDS = (
    "river stone cloud engine paper garden window market letter winter signal copper bridge "
    "candle forest number travel silver island planet kitchen summer doctor pocket"
)
WORDS = _WORDS.split()

ServedTask = str
"""A policy of ``POLICIES``."""


def tasks() -> list[ServedTask]:
    """Return the tasks: one server per policy."""
    return list(POLICIES)


def rows(task: ServedTask) -> dict[str, Any]:
    """Return the row of a policy: each request's cached tokens, and a digest of the answers' texts."""
    with tempfile.TemporaryDirectory() as folder:
        port, log = free_port(), Path(folder) / "server.log"
        arguments = cpu_arguments(model_folder(), kv_tokens=KV_TOKENS, dtype="float32")
        arguments += ["--radix-eviction", task, *POLICY_ARGUMENTS]
        with serving(
            arguments, log=log, port=port, deadline_s=READY_TIMEOUT_S, patience_s=0.0
        ) as server:
            answers = [send(server.url, body) for body in make_bodies()]
    return {
        f"served, {task}": {
            "requests": len(answers),
            "prompt_tokens": sum(prompt_tokens for prompt_tokens, _, _ in answers),
            "cached_tokens": sum(cached_tokens for _, cached_tokens, _ in answers),
            "cached": " ".join(str(cached_tokens) for _, cached_tokens, _ in answers),
            "texts": digest([text for _, _, text in answers]),
        }
    }


def make_bodies() -> list[dict[str, Any]]:
    """Return the bodies of all chat requests, in order."""
    rng = random.Random(29)
    conversations: dict[int, list[dict[str, str]]] = {}
    bodies = []
    for _ in range(REQUEST_COUNT):
        if rng.random() < QUESTION_SHARE:
            question = [{"role": "user", "content": make_text(rng, 100, 160)}]
            bodies.append(make_body(question, canopy_category="rag"))
            continue
        agent = rng.randrange(AGENT_COUNT)
        system = {"role": "system", "content": f"You are agent {agent}."}
        messages = conversations.setdefault(agent, [system])
        messages.append({"role": "user", "content": make_text(rng, 15, 50)})
        turn = len(messages) // 2
        is_over = turn == AGENT_TURNS
        hints: dict[str, Any] = {}  # without hints the server infers turn and category
        if agent % 2:
            hints = {"canopy_category": "agent", "canopy_conversation": f"c{agent}"}
            hints |= {"canopy_turn": turn} | ({"canopy_over": True} if is_over else {})
        bodies.append(make_body(messages, **hints))
        messages.append({"role": "assistant", "content": rng.choice(WORDS)})
        if is_over:
            del conversations[agent]
    return bodies


def make_body(messages: list[dict[str, str]], **hints: Any) -> dict[str, Any]:
    """Return the body of a chat request; ``hints`` are its ``custom_params``."""
    fields = {"model": "m", "messages": [*messages], "max_tokens": ANSWER_TOKENS, "temperature": 0}
    return fields | ({"custom_params": hints} if hints else {})


def make_text(rng: random.Random, min_words: int, max_words: int) -> str:
    """Return a text of ``min_words`` to ``max_words - 1`` words."""
    return " ".join(rng.choice(WORDS) for _ in range(rng.randrange(min_words, max_words)))


def send(url: str, body: dict[str, Any]) -> tuple[int, int, str]:
    """Send a request; return its prompt tokens, how many of them were cached, and the answer's text."""
    answer = post(f"{url}/v1/chat/completions", body, ANSWER_TIMEOUT_S)
    usage = answer["usage"]
    details = usage.get("prompt_tokens_details") or {}
    text = answer["choices"][0]["message"]["content"]
    return usage["prompt_tokens"], details.get("cached_tokens", 0), text
