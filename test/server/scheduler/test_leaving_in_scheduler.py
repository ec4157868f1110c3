"""Clients that disconnect, retry and reuse names, at SGLang's own scheduler."""

from pathlib import Path
from typing import Any

import pytest

from support.overlapped import OVERLAP
from support.worker import worked

PATIENCE_S = 900
COMMON = (
    *("--radix-eviction", "wa", "--page-size", "64", "--chunked-prefill-size", "256"),
    *("--max-running-requests", "2"),
)
OURS = ("--canopy-queue-order", "bounded-shortest")
HOST = (
    *("--enable-hierarchical-cache", "--hicache-ratio", "3", "--max-total-tokens", "2560"),
    *("--hicache-write-policy", "write_back"),
)
PRIORITIES = ("--enable-priority-scheduling", "--default-priority-value", "0")
GATE = ("--canopy-session-gate", "auto")
CALLED = (
    *("_create_generation_req", "_add_request_to_queue", "_get_new_batch_prefill_raw"),
    *("calc_priority", "process_batch_result"),
    *("match_prefix", "begin_insert", "_evict_components"),
)
"""Some of what runs in the scheduler's thread."""


def scenario(model: Path, name: str, *arguments: str) -> dict[str, Any]:
    return worked("leaving_worker", model, name, *COMMON, *arguments, patience_s=PATIENCE_S)


@pytest.mark.long
@pytest.mark.timeout(PATIENCE_S)
def test_a_retry_after_an_abort_is_answered_under_load(small_model) -> None:
    found = scenario(small_model, "retry", *OURS)
    assert found["answered"], found


@pytest.mark.timeout(PATIENCE_S)
def test_between_arrival_and_answer_nothing_of_ours_reads_a_tensor(small_model) -> None:
    """On a GPU such a read would wait. SGLang reads its results, which proves that reads are detected."""
    found = scenario(small_model, "reads", *OURS, *GATE, *PRIORITIES, *HOST)
    assert not found["ours"]
    assert any("batch_result_processor" in by for by in found["sglangs"])
    assert found["answered"] == 26
    assert found["loads"] > 0
    for name in CALLED:
        assert found["calls"].get(name, 0) > 0, name


@pytest.mark.long
@pytest.mark.timeout(PATIENCE_S)
def test_a_name_that_is_used_again_is_another_request(small_model) -> None:
    found = scenario(small_model, "same_name", *OURS)
    assert found == {"answered": True, "equal": True}


@pytest.mark.timeout(PATIENCE_S)
@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param((*OURS, *GATE, *PRIORITIES), id="ours-gate-priorities"),
        pytest.param(OURS, id="ours", marks=pytest.mark.long),
        pytest.param(
            (*OURS, *PRIORITIES, "--max-queued-requests", "3"),
            id="ours-limit",
            marks=pytest.mark.long,
        ),
        pytest.param((), id="fcfs", marks=pytest.mark.long),
        pytest.param(("--schedule-policy", "hrrn"), id="hrrn", marks=pytest.mark.long),
        pytest.param(GATE, id="fcfs-gate", marks=pytest.mark.long),
        pytest.param(("--schedule-policy", "hrrn", *GATE), id="hrrn-gate", marks=pytest.mark.long),
        pytest.param((*OURS, *GATE), id="ours-gate", marks=pytest.mark.long),
        pytest.param((*OURS, *GATE, OVERLAP), id="ours-gate-overlap", marks=pytest.mark.long),
    ],
)
def test_other_requests_are_answered_and_no_memory_is_held_when_one_leaves(
    small_model, arguments
) -> None:
    found = scenario(small_model, "fuzz", *arguments)
    calls = found.pop("calls")
    print(found)
    for name in CALLED:
        assert calls.get(name, 0) > 0, name
    for none in ("wrong", "unserved", "requests", "waiting", "in_queue", "in_gate", "locked"):
        assert found[none] == 0, found
    assert found["slots"] == 0, found
    if GATE[0] in arguments:
        assert found["delayed_sessions"] > 0, found
    if arguments[:2] == OURS:
        assert found["over_bound"] == 0, found
        assert found["fullest_percent"] > 0, found
    assert min(found[some] for some in ("answered", "aborts", "retries", "repeated_names")) > 10
