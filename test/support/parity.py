"""Workloads of the parity suites."""

import random
from collections.abc import Iterator
from typing import Any

PAGE = 4


def turns(draw: random.Random, requests: int) -> Iterator[tuple[float, int, list[int]]]:
    """Yield time, conversation and blocks of turns.

    Conversations grow by a few blocks a turn, a third of them below one system prompt.
    """
    talks: dict[int, list[int]] = {}
    now = 0.0
    for _ in range(requests):
        now += draw.choice([0.25, 1.0, 5.0])
        who = draw.randrange(14)
        if who not in talks or draw.random() < 0.08:
            talks[who] = [1, 2, 3] if who % 3 == 0 else []
        fresh = draw.randrange(1, 5)
        talks[who] = talks[who] + [draw.randrange(10, 10**6) for _ in range(fresh)]
        yield now, who, list(talks[who])


def workload(seed: int, requests: int) -> list[dict[str, Any]]:
    """Turns of chats and agents; some end their conversation."""
    draw = random.Random(seed)
    made = []
    for now, who, blocks in turns(draw, requests):
        kind = ("chat", "agent")[who % 2]
        made.append(
            {
                "time": now,
                "blocks": blocks,
                "category": kind,
                "turn": 1 + len(blocks) // 4,
                "conversation": f"c{who}",
                "stop": "tool" if kind == "agent" and draw.random() < 0.8 else "end",
                "over": draw.random() < 0.05,
            }
        )
    return made


def fields(step: dict[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in step.items() if k not in ("time", "blocks")}


def samples(steps: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The same prompts, each followed by two others of the same time and length: leaves that tie."""
    made = []
    for number, step in enumerate(steps):
        made.append(step)
        for sample in (1, 2):
            blocks = [*step["blocks"][:-1], 10**7 + 3 * number + sample]
            made.append({**step, "blocks": blocks})
    return made
