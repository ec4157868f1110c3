"""Agents and people who use a server through the official ``openai`` client, without any field of Canopy's.

An agent's turn sends the whole conversation and the result of the last tool call. Weights are random, so
SGLang's own ``regex`` and the standard ``logit_bias`` force the shape of a call; SGLang's own parser reads it.
A person sends short questions, with long pauses. All text is drawn from the model's vocabulary, seeded by
the session's number, so that each server receives the same sessions.
"""

from __future__ import annotations

import functools
import json
import random
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import openai

BASH_TOOL = {
    "type": "function",
    "function": {
        "name": "bash",
        "description": "Run a shell command.",
        "parameters": {
            "type": "object",
            "properties": {"command": {"type": "string"}},
            "required": ["command"],
        },
    },
}
TOOL_CALL_REGEX = r'<tool_call>\n\{"name": "bash", "arguments": \{"command": "[a-z]{4} [a-z]{4}"\}\}\n</tool_call>'
ANSWER_TOKENS = 64
PERSON_TURNS, PERSON_PROMPT_TOKENS, PERSON_PAUSE_S = 3, 120, 6.0


@dataclass(frozen=True, slots=True)
class SessionSizes:
    """Number and sizes of the sessions of a workload."""

    sessions: int
    turns: int
    system_tokens: int
    result_tokens: int
    pause_s: tuple[float, float]
    """Least and most seconds between an answer and the next turn."""
    people: int = 0
    stagger_s: float = 0.1
    """Seconds between the starts of two sessions."""


@dataclass
class SessionRun:
    """Sessions against one server, a thread each."""

    url: str
    sizes: SessionSizes
    words: Sequence[str]
    """Words of one token each, of which all text is made."""
    marker_ids: Sequence[int]
    """Token ids of ``<tool_call>`` and ``</tool_call>``."""
    max_sessions: int = 0
    """Most agents' sessions at a time; 0: all."""
    rows: list[dict[str, Any]] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    start_s: float = field(init=False)
    agents_done: threading.Event = field(init=False, default_factory=threading.Event)

    def __post_init__(self) -> None:
        url = f"{self.url}/v1"
        self.client = openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=900)

    def run_sessions(self) -> float:
        """Run all sessions, add each turn to ``rows``, and return the seconds until the last agent's answer."""
        session_limit = threading.Semaphore(self.max_sessions or self.sizes.sessions)
        self.start_s = time.monotonic()
        agent = functools.partial(self._run_agent, session_limit)
        agents = [self._start(agent, "agent", n) for n in range(self.sizes.sessions)]
        people = [self._start(self._run_person, "person", n) for n in range(self.sizes.people)]
        for thread in agents:
            thread.join()
        seconds = time.monotonic() - self.start_s
        self.agents_done.set()
        for thread in people:
            thread.join()
        return seconds

    def _start(self, run: Callable[[int], None], client: str, number: int) -> threading.Thread:
        def record_errors() -> None:
            try:
                run(number)
            except Exception as error:  # a thread's error is lost otherwise
                self.errors.append(f"{client} {number}: {error!r}")

        thread = threading.Thread(target=record_errors)
        thread.start()
        return thread

    def draw_text(self, rng: random.Random, tokens: int) -> str:
        return " ".join(rng.choices(self.words, k=tokens))

    def _run_agent(self, session_limit: threading.Semaphore, number: int) -> None:
        rng, sizes = random.Random(f"agent {number}"), self.sizes
        time.sleep(sizes.stagger_s * number)
        due_s = time.monotonic()  # waiting for ``session_limit`` is part of the time to first token
        with session_limit:
            messages: list[dict[str, Any]] = [
                {"role": "system", "content": self.draw_text(rng, sizes.system_tokens)},
                {"role": "user", "content": self.draw_text(rng, 30)},
            ]
            for turn in range(sizes.turns):
                due_s = due_s if turn == 0 else time.monotonic()
                calls = self.send_turn("agent", number, turn, messages, due_s, tools=[BASH_TOOL])
                if turn == sizes.turns - 1:
                    return
                time.sleep(rng.uniform(*sizes.pause_s))
                messages.append({"role": "assistant", "content": None, "tool_calls": calls})
                result = self.draw_text(rng, round(sizes.result_tokens * rng.uniform(0.8, 1.2)))
                messages += [{"role": "tool", "tool_call_id": c["id"], "content": result} for c in calls]  # fmt: skip

    def _run_person(self, number: int) -> None:
        rng = random.Random(f"person {number}")
        self.agents_done.wait(rng.uniform(0, PERSON_PAUSE_S))
        while not self.agents_done.is_set():
            messages: list[dict[str, Any]] = []
            for turn in range(PERSON_TURNS):
                question = self.draw_text(rng, PERSON_PROMPT_TOKENS)
                messages.append({"role": "user", "content": question})
                self.send_turn("person", number, turn, messages, time.monotonic())
                messages.append({"role": "assistant", "content": self.draw_text(rng, 20)})
                if self.agents_done.wait(rng.expovariate(1 / PERSON_PAUSE_S)):
                    return

    def send_turn(
        self, client: str, number: int, turn: int, messages: list[Any], due_s: float, **options: Any
    ) -> list[dict[str, Any]]:
        """Send a turn that was due at ``due_s``, and add it to ``rows``; return its tool calls for a message."""
        if options:
            options["logit_bias"] = {str(token): 100 for token in self.marker_ids}
            options["extra_body"] = {"regex": TOOL_CALL_REGEX}
        first_token_s, usage, calls = None, None, {}
        stream = self.client.chat.completions.create(
            model="m",
            messages=messages,
            temperature=0,
            max_tokens=ANSWER_TOKENS if options else 20,
            stream=True,
            stream_options={"include_usage": True},
            **options,
        )
        for chunk in stream:
            usage = chunk.usage or usage
            if first_token_s is None and chunk.choices:
                first_token_s = time.monotonic()
            for piece in (piece for c in chunk.choices for piece in c.delta.tool_calls or ()):
                call = calls.setdefault(
                    piece.index, {"type": "function", "function": {"name": "", "arguments": ""}}
                )
                call["id"] = piece.id or call["id"]
                call["function"]["name"] += piece.function.name or ""
                call["function"]["arguments"] += piece.function.arguments or ""
        assert first_token_s is not None
        assert usage is not None
        answered = Turn(
            client,
            number,
            turn,
            first_token_s - due_s,
            time.monotonic() - self.start_s,
            usage.prompt_tokens,
            usage.prompt_tokens_details.cached_tokens or 0 if usage.prompt_tokens_details else 0,
            usage.completion_tokens,
            len(calls),
        )
        self.rows.append(asdict(answered))
        return list(calls.values())


@dataclass(frozen=True, slots=True)
class Turn:
    """One answered request."""

    client_kind: str
    session: int
    turn: int
    ttft_s: float
    """Seconds from when the turn was due, with any wait for another session to end."""
    end_s: float
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    tool_calls: int


def vocabulary(model: Path) -> tuple[list[str], list[int]]:
    """Return lower-case words that are one token each, and the token ids that mark a tool call."""
    tokenizer = json.loads((model / "tokenizer.json").read_text("utf-8"))
    words = (token[1:] for token in tokenizer["model"]["vocab"] if token.startswith("Ġ"))
    words = (w for w in words if w.isascii() and w.isalpha() and w.islower() and 3 <= len(w) <= 9)
    marker_ids = [t["id"] for t in tokenizer["added_tokens"] if "tool_call>" in t["content"]]
    return sorted(words), marker_ids
