"""The loss of a tenant next to one with false hints, in a tree in which each would have half of the pool.

A replay of benchmark/security on a live tree: conversations in rotation, and between two of their
requests the same number of tokens of a neighbour that never returns to its prompts.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest

from support.live_tree import LiveTree

POOL_TOKENS, CONCURRENT_CONVERSATIONS, SYSTEM_TOKENS, TURN_TOKENS, TURNS = 2048, 3, 96, 48, 6
STEP_S = 0.3
WARM_UP_STEPS, STEPS = 150, 400
"""Requests of the conversations: in the warm-up, false hints are detected and curves learnt; in all."""

Hints = Callable[[int, float], dict[str, Any]]


def turn_at(step: int) -> tuple[str, int, list[int]]:
    """Return the conversation, the turn's number and its prompt; some conversations run at a time."""
    lane = step % CONCURRENT_CONVERSATIONS
    turns_before = step // CONCURRENT_CONVERSATIONS + lane
    conversation, turn = 100 * (turns_before // TURNS) + lane, turns_before % TURNS + 1
    tokens = [10_000 + 1000 * conversation + i for i in range(TURN_TOKENS * turn)]
    return f"c{conversation}", turn, [*range(SYSTEM_TOKENS), *tokens]


@cache
def hit_ratio(hints: Hints) -> float:
    """Return the hit ratio of the tenant with conversations, after the warm-up."""
    tree = LiveTree(POOL_TOKENS, "wa")
    hit_tokens = prompt_tokens = 0
    for step in range(STEPS):
        now = 2 * step * STEP_S
        name, turn, tokens = turn_at(step)
        # The tree's keys have no tenants here: the two share no token.
        fields = {"category": "chat", "turn": turn, "conversation": name, "tenant": "steady"}
        hit = tree.serve(tokens, now, path=block_hashes(tokens), block_tokens=16, **fields)
        if step >= WARM_UP_STEPS:
            hit_tokens, prompt_tokens = hit_tokens + hit, prompt_tokens + len(tokens)
        filler = [10**7 + 1000 * step + i for i in range(len(tokens))]
        fields = {"category": "generate", "tenant": "neighbour", **hints(step, now + STEP_S)}
        tree.serve(filler, now + STEP_S, path=block_hashes(filler), block_tokens=16, **fields)
    return hit_tokens / prompt_tokens


def block_hashes(tokens: list[int]) -> list[int]:
    """Chained hashes of the full blocks of 16 tokens."""
    block_hash, hashes = 0, []
    for start in range(0, len(tokens) - 15, 16):
        block_hash = hash((block_hash, *tokens[start : start + 16]))
        hashes.append(block_hash)
    return hashes


def keeps_and_returns(step: int, now: float) -> dict[str, Any]:
    return {"category": f"invented-{step}", "return_in_s": 1.0, "keep_until": now + 3600.0}


def returns_as_a_new_tenant(step: int, now: float) -> dict[str, Any]:
    return {**keeps_and_returns(step, now), "keep_until": None, "tenant": f"invented-{step}"}


def no_hints(step: int, now: float) -> dict[str, Any]:
    return {}


@pytest.mark.parametrize("hints", [keeps_and_returns, returns_as_a_new_tenant])
def test_a_neighbours_false_hints_cost_no_hits_after_detection(hints: Hints) -> None:
    assert hit_ratio(hints) >= hit_ratio(no_hints) - 0.01
