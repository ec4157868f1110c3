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
        conversation = rng.randrange(20) if rng.random() < 0.6 else 100 + number
        category = "api" if conversation >= 100 else ("chat", "code")[conversation % 2]
        new_blocks = {"api": 3, "chat": 1, "code": 9}[category]
        new_path = [rng.randrange(10**9) for _ in range(new_blocks)]
        path = paths[conversation] = [*paths.get(conversation, ()), *new_path]
        if len(path) > 40:
            paths.pop(conversation)
        requests.append(
            TraceRequest(
                time_s=float(number),
                blocks=tuple(path),
                block_tokens=10,
                input_tokens=10 * len(path),
                output_tokens=1,
                category=category,
                turn=1 + len(path) // new_blocks,
                conversation=str(conversation),
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
    tested_class = hindsight_class(name) if name in hindsight_names() else policy_class(name)
    options = {field.name for field in dataclasses.fields(tested_class.Config)}
    if tested_class.takes_tail_target:
        assert options & set(TAIL_TARGETS)
    else:
        assert "ttft_ms" not in options


@pytest.mark.parametrize("name", policy_names())
def test_policies_that_receive_requests_declare_learning(name: str) -> None:
    tested_class = policy_class(name)
    calls = ("arrive", "finish")
    receives_requests = any(
        getattr(tested_class, call) is not getattr(Policy, call) for call in calls
    )
    assert tested_class.learns is receives_requests
