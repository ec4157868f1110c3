"""One made-up traffic for all formats: chats with two system prompts, tools, four turns each."""

import datetime
import random
from dataclasses import dataclass
from typing import Any

START_S = 1_764_000_000.0
TURNS = 4
TALKS = 10


@dataclass(frozen=True)
class Call:
    """One call of a model."""

    at_s: float
    talk: str
    turn: int
    system: str
    history: list[dict[str, str]]
    answer: str

    @property
    def messages(self) -> list[dict[str, str]]:
        """The system prompt and the history."""
        return [{"role": "system", "content": self.system}, *self.history]

    @property
    def tokens(self) -> int:
        """Prompt tokens as this traffic's server counts them."""
        return sum(len(m["content"]) for m in self.messages) // 4 + len(str(TOOLS)) // 4

    @property
    def usage(self) -> dict[str, int]:
        """Counts in OpenAI's form."""
        return {"prompt_tokens": self.tokens, "completion_tokens": 25}


def words(draw: random.Random, count: int) -> str:
    return " ".join(f"w{draw.randrange(3000):04d}" for _ in range(count))


def calls(talks: int = TALKS, seed: int = 7) -> list[Call]:
    """The calls by time; no two arrive at the same time."""
    draw = random.Random(seed)
    systems = [words(draw, 200), words(draw, 150)]
    made = []
    for talk in range(talks):
        at_s, history = draw.uniform(0, 600), []
        for turn in range(1, TURNS + 1):
            history = [*history, {"role": "user", "content": words(draw, 50)}]
            answer = words(draw, 40)
            made.append(Call(at_s, f"s{talk}", turn, systems[talk % 2], history, answer))
            history = [*history, {"role": "assistant", "content": answer}]
            at_s += draw.uniform(20, 90)
    return sorted(made, key=lambda call: call.at_s)


_DRAW = random.Random(3)
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": f"t{n}", "description": words(_DRAW, 30),
                                      "parameters": {"type": "object", "properties": {}}}}
    for n in range(3)
]  # fmt: skip


def when(at_s: float) -> str:
    """A time as most exports write it."""
    stamp = datetime.datetime.fromtimestamp(START_S + at_s, datetime.timezone.utc)
    return stamp.isoformat().replace("+00:00", "Z")
