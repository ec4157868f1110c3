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

AGENTS, READERS = 10, 3
MIN_TURNS, MAX_TURNS = 6, 10
TASK_CHARS = TOOL_CHARS = 240
DOCUMENT_CHARS = 800
ANSWER_TOKENS = 8
THINK_S = (3.0, 7.0)
READ_S = 1.0
"""Mean pause of a reader between two documents."""
SUFFIXES = (".md", ".py", ".txt", ".rst", ".json", ".jsonl", ".log")
MAX_FILES, FILE_CHARS, MIN_CHARS = 500, 50_000, 20_000
SYSTEM = """\
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
    paths = sorted(p for f in folders for p in f.rglob("*") if p.suffix in SUFFIXES and p.is_file())
    texts = [p.read_text("utf-8", errors="replace")[:FILE_CHARS] for p in paths[:MAX_FILES]]
    texts = [text for text in texts if len(text) > DOCUMENT_CHARS]
    if sum(map(len, texts)) < MIN_CHARS:
        raise SetupError(
            f"--data {', '.join(map(str, folders))}: less than {MIN_CHARS:,} characters in files "
            f"that end in {', '.join(SUFFIXES)}; give a folder with more text"
        )
    return texts


def piece(texts: Sequence[str], characters: int, draw: random.Random) -> str:
    """So many characters of one of the texts, from anywhere in it."""
    text = draw.choice(texts)
    start = draw.randrange(max(1, len(text) - characters))
    return text[start : start + characters]


def task(texts: Sequence[str], draw: random.Random) -> Iterator[Messages]:
    """Yield the prompts of a task. The caller appends each answer to the list before the next one."""
    messages = [{"role": "system", "content": SYSTEM}]
    ask = f"Task {draw.randrange(10**6)}: explain this, then improve it.\n\n"
    text = ask + piece(texts, TASK_CHARS, draw)
    for _ in range(draw.randint(MIN_TURNS, MAX_TURNS)):
        messages.append({"role": "user", "content": text})
        yield messages
        text = "Output of your command:\n" + piece(texts, TOOL_CHARS, draw)


def question(texts: Sequence[str], draw: random.Random) -> Messages:
    """A reader's prompt."""
    document = piece(texts, DOCUMENT_CHARS, draw)
    return [{"role": "user", "content": f"{document}\n\nWhat is this about, in one sentence?"}]


class AgentTraffic:
    """Agents and readers, a thread each, against one server."""

    def __init__(self, url: str, model: str, texts: Sequence[str]) -> None:
        import openai

        self.client: Any = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=300)  # fmt: skip
        self.model, self.texts = model, texts
        self.answers: list[ClientTurn] = []
        self.failed: BaseException | None = None
        self._end_s = 0.0
        self._lock = threading.Lock()

    def run(
        self, seconds: float, progress: Callable[[list[ClientTurn]], object]
    ) -> list[ClientTurn]:
        """Return the answers whose first token arrived within ``seconds``, and pass them to ``progress``.

        Each client has its own seed, so every server receives the same tasks. Raises the exception
        of a failed request.
        """
        self._end_s = time.monotonic() + seconds
        everyone = [(self._agent, n) for n in range(AGENTS)]
        everyone += [(self._reader, n) for n in range(READERS)]
        threads = [
            threading.Thread(
                target=self._run_client, args=(act, random.Random(f"{act.__name__}{n}"))
            )
            for act, n in everyone
        ]
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            time.sleep(0.5)
            with self._lock:
                progress(list(self.answers))
        if self.failed is not None:
            raise self.failed
        return self.answers

    def _run_client(self, act: Callable[[random.Random], None], draw: random.Random) -> None:
        try:
            act(draw)
        except BaseException as error:
            self.failed, self._end_s = error, 0.0

    def _agent(self, draw: random.Random) -> None:
        self._pause(draw.uniform(0, THINK_S[1]))
        while time.monotonic() < self._end_s:
            for messages in task(self.texts, draw):
                if time.monotonic() >= self._end_s:
                    break
                messages.append({"role": "assistant", "content": self._ask("agent", messages)})
                self._pause(draw.uniform(*THINK_S))

    def _reader(self, draw: random.Random) -> None:
        self._pause(draw.uniform(0, READ_S))
        while time.monotonic() < self._end_s:
            self._ask("reader", question(self.texts, draw))
            self._pause(draw.expovariate(1 / READ_S))

    def _pause(self, seconds: float) -> None:
        time.sleep(max(0.0, min(seconds, self._end_s - time.monotonic())))

    def _ask(self, client_kind: str, messages: Messages) -> str:
        start_s = time.monotonic()
        first, text, usage = None, "", None
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
                if first is None and (choice.delta.content or choice.finish_reason):
                    first = time.monotonic()
        if first is not None and first < self._end_s and usage is not None:
            details = usage.prompt_tokens_details
            cached = (details.cached_tokens or 0) if details else 0
            with self._lock:
                self.answers.append(
                    ClientTurn(client_kind, first - start_s, usage.prompt_tokens, cached)
                )
        return text


@dataclass(frozen=True, slots=True)
class Outcome:
    """Results of a run that a user notices."""

    steps: int
    """Finished steps of agents."""
    documents: int
    first_token_s: float
    """Mean over the agents' steps."""
    hit_ratio: float
    """Prompt tokens from the cache, of all."""


def outcome(answers: Sequence[ClientTurn]) -> Outcome:
    waits = [answer.first_token_s for answer in answers if answer.client_kind == "agent"]
    tokens = sum(answer.prompt_tokens for answer in answers)
    return Outcome(
        steps=len(waits),
        documents=len(answers) - len(waits),
        first_token_s=sum(waits) / len(waits) if waits else 0.0,
        hit_ratio=sum(answer.cached_tokens for answer in answers) / tokens if tokens else 0.0,
    )


def side_by_side(outcomes: dict[str, Outcome], seconds: float) -> str:
    """Runs as a table, and a sentence on each but the first, which is compared with the run before it."""
    rows = (
        (f"agents' steps done in {seconds:.0f} s", lambda o: f"{o.steps}"),
        ("documents read", lambda o: f"{o.documents}"),
        ("an agent waits for its first token", lambda o: f"{o.first_token_s:.1f} s"),
        ("prompt tokens found in the cache", lambda o: f"{100 * o.hit_ratio:.0f} %"),
    )
    wide = max(len(label) for label, _ in rows)
    lines = [" " * wide + "".join(f"{name:>13}" for name in outcomes)]
    lines += [f"{label:{wide}}" + "".join(f"{f(o):>13}" for o in outcomes.values()) for label, f in rows]  # fmt: skip
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
