"""Orders of the queue in SGLang's own scheduler, a real model computing: order, and equal answers."""

from pathlib import Path
from typing import Any

import pytest

from sglang_canopy.schedule.prefill_cost import PRIOR, REFIT_BATCHES
from support.worker import worked

PATIENCE_S = 600
COMMON = ("--radix-eviction", "wa", "--page-size", "64", "--chunked-prefill-size", "256")
OURS = ("--canopy-queue-order", "bounded-shortest")
FEW = ("--max-running-requests", "3")
KINDS = ("urgent", "short", "long")
PRIORITIES = ("--enable-priority-scheduling", "--disable-priority-preemption")


def scheduled(model: Path, *arguments: str, **environment: str) -> dict[str, Any]:
    given = (*COMMON, *arguments)
    return worked("scheduler_worker", model, *given, patience_s=PATIENCE_S, **environment)


@pytest.mark.timeout(PATIENCE_S)
def test_short_and_urgent_requests_overtake_and_answers_are_unchanged(small_model) -> None:
    found = scheduled(small_model, *OURS, *FEW, *PRIORITIES, "--default-priority-value", "0")
    assert found["equal"]
    # Requests that end in the same step are listed by kind: a short one may fill an urgent batch.
    place = {kind: [i for i, k in enumerate(found["kinds"]) if k == kind] for kind in KINDS}
    assert max(place["urgent"]) < min(place["long"])
    assert max(place["short"]) < max(place["long"])
    assert sum(place["short"]) < sum(place["long"])
    assert found["batches"] >= REFIT_BATCHES
    assert found["fitted"] != list(PRIOR)


@pytest.mark.timeout(PATIENCE_S)
def test_a_shorter_request_leaves_no_room_for_half_of_another(small_model) -> None:
    """SGLang keeps one prompt in the middle of its chunks, and stops when there would be two."""
    given = ("--radix-eviction", "wa", "--chunked-prefill-size", "256", *OURS)
    found = worked("sharing_worker", small_model, "shared", *given, patience_s=PATIENCE_S)
    assert found["answered"] == 64
    assert found["beside"] > 20


@pytest.mark.long
@pytest.mark.timeout(PATIENCE_S)
def test_step_sharers_leave_the_long_prompt_its_memory(small_model) -> None:
    """A request locks the cached tokens that it matches, so they are no longer free."""
    given = ("--radix-eviction", "wa", "--chunked-prefill-size", "256", *OURS)
    found = worked("sharing_worker", small_model, "cached", *given, patience_s=PATIENCE_S)
    assert found["answered"] == 7
    assert found["beside"] > 0


@pytest.mark.long
@pytest.mark.timeout(PATIENCE_S)
@pytest.mark.parametrize("policy", ["hrrn", "lpm"])
def test_sglangs_own_orders_work_with_our_tree(small_model, policy: str) -> None:
    found = scheduled(small_model, "--schedule-policy", policy, *FEW)
    assert found["equal"]
    assert found["policy"] == policy


@pytest.mark.long
@pytest.mark.timeout(PATIENCE_S)
def test_answers_survive_retraction(small_model) -> None:
    found = scheduled(small_model, *OURS, SGLANG_TEST_RETRACT="1")
    assert found["equal"]
    assert found["retracted"] > 0
