"""The placebo leaves a policy nothing to learn from."""

import random
from typing import NamedTuple

import pytest

from canopy_lab.advise.arms import CANOPY_LRU, PLACEBO_ARM, WA, run_arms
from canopy_lab.sim.compact import CompactTrace
from canopy_lab.sim.sweep import PolicyArm, SweepPlan, run_sweep
from canopy_lab.trace.record import TraceRequest

CAPACITY_BLOCKS = 300


class DueTurn(NamedTuple):
    due_s: float
    turn: int
    path: tuple[int, ...]
    """Its blocks so far."""


def random_chats(requests: int = 2000) -> list[TraceRequest]:
    """Return chats without labels; nine in ten first turns end there, and later turns mostly continue."""
    rng, trace, new_blocks = random.Random(5), [], iter(range(10**9))
    waiting: list[DueTurn] = []
    now_s = 0.0
    while len(trace) < requests:
        now_s += rng.expovariate(1.0)
        due_chat = next((chat for chat in waiting if chat.due_s <= now_s), None)
        if due_chat is not None:
            waiting.remove(due_chat)
        _, turn, path = due_chat or DueTurn(now_s, 1, ())
        path = (*path, *(next(new_blocks) for _ in range(4)))
        trace.append(TraceRequest(now_s, 64 * len(path), 10, path, 64, line=len(trace) + 1))
        if rng.random() < (0.1 if turn == 1 else 0.9) and turn < 30:
            waiting.append(DueTurn(now_s + rng.expovariate(1 / 60), turn + 1, path))
    return trace


@pytest.fixture(scope="module")
def trace() -> CompactTrace:
    return CompactTrace(random_chats())


def test_the_placebo_removes_the_gain_of_inferred_turns(trace: CompactTrace) -> None:
    """In ``simulate`` and in ``advise``."""
    arms = (PolicyArm("lru"), PolicyArm("wa"))
    plan = SweepPlan(arms, (CAPACITY_BLOCKS,), seeds=(1,), placebo=True)
    lru, wa, placebo = (row["block_hit_ratio"] for row in run_sweep(plan, trace, jobs=1))
    assert wa - lru > 0.03
    assert placebo - lru < (wa - lru) / 4
    sized_arms = [(arm, CAPACITY_BLOCKS) for arm in (CANOPY_LRU, WA, PLACEBO_ARM)]
    runs = run_arms(list(trace), sized_arms, jobs=1)
    lru_missed, wa_missed, placebo_missed = (int(runs[arm].sum()) for arm in sized_arms)
    assert lru_missed - placebo_missed < (lru_missed - wa_missed) / 4
