"""The quick start's traffic: agents that return and readers that do not, with real text.

An agent works on a task in a few turns. Each turn sends the whole conversation and, as the output
of its tool, another piece of a file. A reader sends one question about a file and never returns.
All requests are plain chats without labels or hints.
"""

from __future__ import annotations

import itertools
import random
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from environment import SetupError

AGENT_COUNT, READER_COUNT = 10, 3
MIN_TURNS, MAX_TURNS = 6, 10
TASK_CHARS = TOOL_CHARS = 240
DOCUMENT_CHARS = 800
ANSWER_TOKENS = 8
THINK_RANGE_S = (3.0, 7.0)
MEAN_READ_S = 1.0
"""Mean pause of a reader between two documents."""
TEXT_SUFFIXES = (".md", ".py", ".txt", ".rst", ".json", ".jsonl", ".log")
MAX_FILES, MAX_FILE_CHARS, MIN_TOTAL_CHARS = 500, 50_000, 20_000
SYSTEM_PROMPT = """\
You are an agent that works on a code base in small steps. In each step you read the output of your \
last command and reply with one short command, or with DONE when nothing is left to do.

Rules:
- One command a step. Look before you change: list files, search, read only the lines you need.
- Prefer grep and sed to whole files; outputs longer than a screen are cut off.
- Never change a test to make it pass. Never touch files outside the task.
- When a command fails, read its message, and try something else instead of the same again.
- Before DONE, run the tests of what you changed and look at the difference once more.
"""

Messages = list[dict[str, str]]


@dataclass(frozen=True, slots=True)
class ClientTurn:
    """One finished request."""

    client_kind: str
    """``agent`` or ``reader``."""
    first_token_s: float
    """From sending, the wait in the server's queue included."""
    prompt_tokens: int
    cached_tokens: int


def read_texts(folders: Iterable[Path]) -> list[str]:
    """Return the text files below ``folders``, sorted by name. Raises SetupError if there is too
    little text for different prompts."""
    folders = list(folders)
    files = sorted(file for folder in folders for file in folder.rglob("*") if file.is_file())
    paths = [file for file in files if file.suffix in TEXT_SUFFIXES]
    texts = [p.read_text("utf-8", errors="replace")[:MAX_FILE_CHARS] for p in paths[:MAX_FILES]]
    texts = [text for text in texts if len(text) > DOCUMENT_CHARS]
    if sum(map(len, texts)) < MIN_TOTAL_CHARS:
        raise SetupError(
            f"--data {', '.join(map(str, folders))}: less than {MIN_TOTAL_CHARS:,} characters in files "
            f"that end in {', '.join(TEXT_SUFFIXES)}; give a folder with more text"
        )
    return texts


def excerpt(texts: Sequence[str], characters: int, rng: random.Random) -> str:
    """Return ``characters`` consecutive characters of a random text."""
    text = rng.choice(texts)
    start = rng.randrange(max(1, len(text) - characters))
    return text[start : start + characters]


def task_prompts(texts: Sequence[str], rng: random.Random) -> Iterator[Messages]:
    """Yield the prompts of a task. The caller appends each answer to the list before the next one."""
    messages = [{"role": "system", "content": SYSTEM_PROMPT}]
    ask = f"Task {rng.randrange(10**6)}: explain this, then improve it.\n\n"
    text = ask + excerpt(texts, TASK_CHARS, rng)
    for _ in range(rng.randint(MIN_TURNS, MAX_TURNS)):
        messages.append({"role": "user", "content": text})
        yield messages
        text = "Output of your command:\n" + excerpt(texts, TOOL_CHARS, rng)


def reader_prompt(texts: Sequence[str], rng: random.Random) -> Messages:
    """Return the prompt of a reader: a document and a question."""
    document = excerpt(texts, DOCUMENT_CHARS, rng)
    return [{"role": "user", "content": f"{document}\n\nWhat is this about, in one sentence?"}]


class AgentTraffic:
    """Agents and readers, a thread each, against one server."""

    def __init__(self, url: str, model: str, texts: Sequence[str]) -> None:
        import openai

        self.client: Any = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=300)  # fmt: skip
        self.model, self.texts = model, texts
        self.turns: list[ClientTurn] = []
        self.failure: BaseException | None = None
        self._ends_at = 0.0
        self._lock = threading.Lock()

    def run(
        self, seconds: float, progress: Callable[[list[ClientTurn]], object]
    ) -> list[ClientTurn]:
        """Return the turns whose first token arrived within ``seconds``, and pass them to ``progress``.

        Each client has its own seed, so every server receives the same tasks. Raises the exception
        of a failed request.
        """
        self._ends_at = time.monotonic() + seconds
        clients = [(self._agent, n) for n in range(AGENT_COUNT)]
        clients += [(self._reader, n) for n in range(READER_COUNT)]
        threads = [
            threading.Thread(
                target=self._run_client, args=(act, random.Random(f"{act.__name__}{n}"))
            )
            for act, n in clients
        ]
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            time.sleep(0.5)
            with self._lock:
                progress(list(self.turns))
        if self.failure is not None:
            raise self.failure
        return self.turns

    def _run_client(self, act: Callable[[random.Random], None], rng: random.Random) -> None:
        try:
            act(rng)
        except BaseException as error:
            self.failure, self._ends_at = error, 0.0

    def _agent(self, rng: random.Random) -> None:
        self._pause(rng.uniform(0, THINK_RANGE_S[1]))
        while time.monotonic() < self._ends_at:
            for messages in task_prompts(self.texts, rng):
                if time.monotonic() >= self._ends_at:
                    break
                messages.append({"role": "assistant", "content": self._ask("agent", messages)})
                self._pause(rng.uniform(*THINK_RANGE_S))

    def _reader(self, rng: random.Random) -> None:
        self._pause(rng.uniform(0, MEAN_READ_S))
        while time.monotonic() < self._ends_at:
            self._ask("reader", reader_prompt(self.texts, rng))
            self._pause(rng.expovariate(1 / MEAN_READ_S))

    def _pause(self, seconds: float) -> None:
        time.sleep(max(0.0, min(seconds, self._ends_at - time.monotonic())))

    def _ask(self, client_kind: str, messages: Messages) -> str:
        sent_at = time.monotonic()
        first_token_at, text, usage = None, "", None
        stream = self.client.chat.completions.create(
            model=self.model,
            messages=messages,
            max_tokens=ANSWER_TOKENS,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
        for chunk in stream:
            usage = chunk.usage or usage
            for choice in chunk.choices:
                text += choice.delta.content or ""
                if first_token_at is None and (choice.delta.content or choice.finish_reason):
                    first_token_at = time.monotonic()
        if first_token_at is not None and first_token_at < self._ends_at and usage is not None:
            details = usage.prompt_tokens_details
            cached_tokens = (details.cached_tokens or 0) if details else 0
            first_token_s = first_token_at - sent_at
            turn = ClientTurn(client_kind, first_token_s, usage.prompt_tokens, cached_tokens)
            with self._lock:
                self.turns.append(turn)
        return text


@dataclass(frozen=True, slots=True)
class Outcome:
    """Results of a run, as its users experience them."""

    steps: int
    """Finished steps of agents."""
    documents: int
    first_token_s: float
    """Mean over the agents' steps."""
    hit_ratio: float
    """Prompt tokens from the cache, of all."""


def outcome_of(turns: Sequence[ClientTurn]) -> Outcome:
    waits_s = [turn.first_token_s for turn in turns if turn.client_kind == "agent"]
    prompt_tokens = sum(turn.prompt_tokens for turn in turns)
    return Outcome(
        steps=len(waits_s),
        documents=len(turns) - len(waits_s),
        first_token_s=sum(waits_s) / len(waits_s) if waits_s else 0.0,
        hit_ratio=sum(turn.cached_tokens for turn in turns) / max(1, prompt_tokens),
    )


def comparison_table(outcomes: dict[str, Outcome], seconds: float) -> str:
    """Return a table of the runs, and a sentence for each that compares it with the run before it."""
    rows = (
        (f"agents' steps done in {seconds:.0f} s", lambda o: f"{o.steps}"),
        ("documents read", lambda o: f"{o.documents}"),
        ("an agent waits for its first token", lambda o: f"{o.first_token_s:.1f} s"),
        ("prompt tokens found in the cache", lambda o: f"{100 * o.hit_ratio:.0f} %"),
    )
    label_width = max(len(label) for label, _ in rows)
    lines = [" " * label_width + "".join(f"{name:>13}" for name in outcomes)]
    lines += [f"{label:{label_width}}" + "".join(f"{f(o):>13}" for o in outcomes.values()) for label, f in rows]  # fmt: skip
    lines.append("")
    for (earlier, before), (later, after) in itertools.pairwise(outcomes.items()):
        if before.steps and after.steps:
            change = 100 * (after.steps / before.steps - 1)
            points = 100 * (after.hit_ratio - before.hit_ratio)
            lines.append(
                f"{later} against {earlier}: {abs(points):.0f} points "
                f"{'more' if points >= 0 else 'less'} of the prompts found in the cache, "
                f"{abs(change):.0f} % {'more' if change >= 0 else 'less'} steps done."
            )
    lines.append("Steps change with whatever else this machine does meanwhile.")
    return "\n".join(lines)
