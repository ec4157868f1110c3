"""The class attributes that the simulator uses are true of every policy."""

import dataclasses
import random

import pytest

from canopy_lab.sim.driver import simulate
from canopy_lab.sim.hindsight import hindsight_class, hindsight_names
from canopy_lab.trace.record import TraceRequest
from sglang_canopy.policy.base import TAIL_TARGETS, Policy
from sglang_canopy.policy.registry import make_policy, policy_class, policy_names

OPTIONS = {
    name: {"threshold_tokens": 100}
    for name in ("threshold-lru", "sglang-tlru", "canopy-tlru", "etlru")
}


def trace() -> list[TraceRequest]:
    """Chats that grow slowly, code sessions that grow fast, and API calls that do not return."""
    draw, requests, talks = random.Random(3), [], {}
    for at in range(600):
        who = draw.randrange(20) if draw.random() < 0.6 else 100 + at
        category = "api" if who >= 100 else ("chat", "code")[who % 2]
        fresh = {"api": 3, "chat": 1, "code": 9}[category]
        path = talks[who] = [*talks.get(who, ()), *(draw.randrange(10**9) for _ in range(fresh))]
        if len(path) > 40:
            talks.pop(who)
        requests.append(
            TraceRequest(
                time_s=float(at),
                blocks=tuple(path),
                block_tokens=10,
                input_tokens=10 * len(path),
                output_tokens=1,
                category=category,
                turn=1 + len(path) // fresh,
                conversation=str(who),
            )
        )
    return requests


@pytest.mark.parametrize("name", policy_names())
def test_shuffled_labels_change_only_policies_that_read_them(name: str) -> None:
    def uncached(placebo_seed: int | None) -> list[int]:
        policy = make_policy(name, OPTIONS.get(name))
        return list(simulate(trace(), policy, 150, placebo_seed=placebo_seed).uncached_tokens)

    changed = uncached(None) != uncached(1)
    assert changed == policy_class(name).reads_labels


@pytest.mark.parametrize("name", [*policy_names(), *hindsight_names()])
def test_policies_with_a_tail_target_have_its_option(name: str) -> None:
    made = hindsight_class(name) if name in hindsight_names() else policy_class(name)
    options = {field.name for field in dataclasses.fields(made.Config)}
    if made.takes_tail_target:
        assert options & set(TAIL_TARGETS)
    else:
        assert "ttft_ms" not in options


@pytest.mark.parametrize("name", policy_names())
def test_policies_that_receive_requests_declare_learning(name: str) -> None:
    cls = policy_class(name)
    hears = any(getattr(cls, call) is not getattr(Policy, call) for call in ("arrive", "finish"))
    assert cls.learns is hears
