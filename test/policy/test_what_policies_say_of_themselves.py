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


def make_trace() -> list[TraceRequest]:
    """Chats that grow slowly, code sessions that grow fast, and API calls that do not return."""
    rng, requests, paths = random.Random(3), [], {}
    for number in range(600):
        chat = rng.randrange(20) if rng.random() < 0.6 else 100 + number
        category = "api" if chat >= 100 else ("chat", "code")[chat % 2]
        blocks = {"api": 3, "chat": 1, "code": 9}[category]
        path = paths[chat] = [*paths.get(chat, ()), *(rng.randrange(10**9) for _ in range(blocks))]
        if len(path) > 40:
            paths.pop(chat)
        requests.append(
            TraceRequest(
                time_s=float(number),
                blocks=tuple(path),
                block_tokens=10,
                input_tokens=10 * len(path),
                output_tokens=1,
                category=category,
                turn=1 + len(path) // blocks,
                conversation=str(chat),
            )
        )
    return requests


@pytest.mark.parametrize("name", policy_names())
def test_shuffled_labels_change_only_policies_that_read_them(name: str) -> None:
    def uncached_tokens(placebo_seed: int | None) -> list[int]:
        policy = make_policy(name, OPTIONS.get(name))
        return list(simulate(make_trace(), policy, 150, placebo_seed=placebo_seed).uncached_tokens)

    changed = uncached_tokens(None) != uncached_tokens(1)
    assert changed == policy_class(name).reads_labels


@pytest.mark.parametrize("name", [*policy_names(), *hindsight_names()])
def test_policies_with_a_tail_target_have_its_option(name: str) -> None:
    cls = hindsight_class(name) if name in hindsight_names() else policy_class(name)
    options = {field.name for field in dataclasses.fields(cls.Config)}
    if cls.takes_tail_target:
        assert options & set(TAIL_TARGETS)
    else:
        assert "ttft_ms" not in options


@pytest.mark.parametrize("name", policy_names())
def test_policies_that_receive_requests_declare_learning(name: str) -> None:
    cls = policy_class(name)
    receives = any(getattr(cls, hook) is not getattr(Policy, hook) for hook in ("arrive", "finish"))
    assert cls.learns is receives
