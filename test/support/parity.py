"""Workloads of the parity suites, and a step of them on a live tree."""

import random
from collections.abc import Iterator
from typing import Any

PAGE_TOKENS = 4


def turns(rng: random.Random, request_count: int) -> Iterator[tuple[float, int, list[int]]]:
    """Yield (time in seconds, conversation, block ids) of turns. Conversations grow by a few blocks a turn, a
    third of them below one system prompt."""
    paths: dict[int, list[int]] = {}
    now_s = 0.0
    for _ in range(request_count):
        now_s += rng.choice([0.25, 1.0, 5.0])
        conversation = rng.randrange(14)
        if conversation not in paths or rng.random() < 0.08:
            paths[conversation] = [1, 2, 3] if conversation % 3 == 0 else []
        new_blocks = [rng.randrange(10, 10**6) for _ in range(rng.randrange(1, 5))]
        paths[conversation] = paths[conversation] + new_blocks
        yield now_s, conversation, list(paths[conversation])


def workload(seed: int, request_count: int) -> list[dict[str, Any]]:
    """Turns of chats and agents; some end their conversation."""
    rng = random.Random(seed)
    steps = []
    for now_s, conversation, blocks in turns(rng, request_count):
        category = ("chat", "agent")[conversation % 2]
        steps.append(
            {
                "time": now_s,
                "blocks": blocks,
                "category": category,
                "turn": 1 + len(blocks) // 4,
                "conversation": f"c{conversation}",
                "stop": "tool" if category == "agent" and rng.random() < 0.8 else "end",
                "over": rng.random() < 0.05,
            }
        )
    return steps


def fields_of(step: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in step.items() if name not in ("time", "blocks")}


def chained_path(step: dict[str, Any]) -> tuple[int, ...]:
    """The path of a step: the same block below another prefix is another block."""
    blocks = step["blocks"]
    return tuple(hash((*blocks[: i + 1],)) for i in range(len(blocks)))


def tokens_of(step: dict[str, Any], page_tokens: int) -> list[int]:
    return [token for block in step["blocks"] for token in [block] * page_tokens]


def serve_tiers(tree: Any, step: dict[str, Any], page_tokens: int) -> Any:
    """Serve a step on the device and the host; return SGLang's match."""
    tokens = tokens_of(step, page_tokens)
    labels = {"path": chained_path(step), "block_tokens": page_tokens, "prompt_tokens": len(tokens)}
    request = tree.request(step["time"], **labels, **fields_of(step))
    match = tree.cache.match_prefix(tree.match_params(tokens))
    request.cached_tokens = match.device_prefix_len
    tree.core.requests.finish(request)
    tree.load_back(tokens)
    tree.insert(tokens, request)
    return match


def add_samples(steps: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the steps, each followed by two others of the same time and length, whose leaves tie."""
    steps_with_samples = []
    for step_number, step in enumerate(steps):
        steps_with_samples.append(step)
        for sample in (1, 2):
            blocks = [*step["blocks"][:-1], 10**7 + 3 * step_number + sample]
            steps_with_samples.append({**step, "blocks": blocks})
    return steps_with_samples
