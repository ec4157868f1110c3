"""Scripted scenarios at SGLang's own scheduler, a real model computing: `support.scenarios`."""

from typing import Any

import pytest

from sglang_canopy.schedule.cost import PRIOR_COEFFICIENTS, REFIT_BATCHES
from support.worker import run_in_scheduler_process

RUN_TIMEOUT_S = 900
CHUNK_FLAGS = ("--chunked-prefill-size", "256")
PAGE_FLAGS = ("--page-size", "64", *CHUNK_FLAGS)
ORDER = ("--canopy-queue-order", "bounded-shortest")
LIMIT_FLAGS = ("--max-running-requests", "3")
PRIORITY_FLAGS = ("--enable-priority-scheduling", "--default-priority-value", "0")
SERVER = ("--page-size", "16", *CHUNK_FLAGS, "--max-queued-requests", "2")
pytestmark = pytest.mark.timeout(RUN_TIMEOUT_S)


def run_scenario(scenario: str, model: Any, *flags: str, policy: str = "wa", **keywords: Any):
    flags = ("--radix-eviction", policy, *flags) if policy else flags
    function = f"scenarios:{scenario}"
    return run_in_scheduler_process(function, model, *flags, timeout_s=RUN_TIMEOUT_S, **keywords)


def test_short_and_urgent_requests_overtake_and_answers_are_unchanged(small_model) -> None:
    flags = (*PAGE_FLAGS, *ORDER, *LIMIT_FLAGS, *PRIORITY_FLAGS, "--disable-priority-preemption")
    result = run_scenario("answer_in_order", small_model, *flags)
    assert result["equal"]
    # Requests that end in the same step are listed by kind: a short one may fill an urgent batch.
    kinds = ("urgent", "short", "long")
    answered = list(enumerate(result["answered_kinds"]))
    positions = {kind: [i for i, k in answered if k == kind] for kind in kinds}
    assert max(positions["urgent"]) < min(positions["long"])
    assert max(positions["short"]) < max(positions["long"])
    assert sum(positions["short"]) < sum(positions["long"])
    assert result["batches"] >= REFIT_BATCHES
    assert result["fitted"] != list(PRIOR_COEFFICIENTS)


@pytest.mark.long
@pytest.mark.parametrize("order", ["hrrn", "lpm"])
def test_sglangs_own_orders_work_with_our_tree(small_model, order: str) -> None:
    flags = ("--schedule-policy", order)
    result = run_scenario("answer_in_order", small_model, *PAGE_FLAGS, *flags, *LIMIT_FLAGS)
    assert (result["equal"], result["policy"]) == (True, order)


@pytest.mark.long
def test_answers_survive_retraction(small_model) -> None:
    retract = {"SGLANG_TEST_RETRACT": "1"}
    result = run_scenario("answer_in_order", small_model, *PAGE_FLAGS, *ORDER, environment=retract)
    assert result["equal"]
    assert result["retracted"] > 0


@pytest.mark.parametrize("needs_cache", [False, pytest.param(True, marks=pytest.mark.long)])
def test_a_shorter_request_leaves_a_long_prompt_its_step_and_memory(small_model, needs_cache):
    """SGLang keeps one prompt in the middle of its chunks, and stops if there would be two. A request locks
    the cached tokens that it matches, so they are no longer free."""
    result = run_scenario("share_steps", small_model, *CHUNK_FLAGS, *ORDER, needs_cache=needs_cache)
    assert result["answered"] == (7 if needs_cache else 64)
    assert result["admitted_together"] > (0 if needs_cache else 20)


@pytest.mark.long
def test_a_name_used_again_is_another_request_and_a_retry_is_answered(small_model) -> None:
    result = run_scenario("retry", small_model, *PAGE_FLAGS, "--max-running-requests", "2", *ORDER)
    assert result["equal"]
    assert result["answered"], result


def test_between_arrival_and_answer_nothing_of_ours_reads_a_tensor(small_model) -> None:
    """On a GPU such a read would wait. SGLang reads its results, which proves that reads are detected."""
    host = ("--enable-hierarchical-cache", "--hicache-ratio", "3", "--max-total-tokens", "2560")
    flags = (*ORDER, "--canopy-session-gate", "auto", *PRIORITY_FLAGS, *host)
    flags += ("--hicache-write-policy", "write_back", "--max-running-requests", "2")
    result = run_scenario("count_reads", small_model, *PAGE_FLAGS, *flags)
    assert not result["ours"]
    assert any("batch_result_processor" in caller for caller in result["sglangs"])
    assert result["answered"] == 26
    assert result["loads"] > 0
    for name in (
        *filter(is_in_sglang, ("_create_generation_req",)),
        *("_add_request_to_queue", "_get_new_batch_prefill_raw"),
        *("calc_priority", "process_batch_result"),
        *("match_prefix", "begin_insert", "_evict_components"),
    ):
        assert result["calls"].get(name, 0) > 0, name


def is_in_sglang(name: str) -> bool:
    """Return whether the installed scheduler has a method: 0.5.22 lacks two that Canopy hooks."""
    from sglang.srt.managers.scheduler import Scheduler

    return hasattr(Scheduler, name)


def expected_refusals() -> dict[str, int]:
    """Return the counted refusals; a release without the hook does not count those from the queue."""
    counted_removals = int(is_in_sglang("send_abort_output"))
    return {"invalid": 1, "queue": counted_removals, "given_up": 2 * counted_removals}


def test_only_admitted_requests_are_learnt_and_counted_once(tiny_model) -> None:
    """Samples (n = 4) of three prompts, refusals and retries."""
    samples, conversations = 4, 3
    assert run_scenario("teach_policies", tiny_model, "--canopy-whatif", "auto", *SERVER) == {
        "turns": [1] * (samples * conversations),
        "samples_learnt": 0,
        "refused_at_the_limit": True,
        "retried_turn": 1,
        "returns": 0,
        "requests": conversations + 3,
        "prompt_tokens": 300 * conversations + 2 * 100 + 300,
        "metered_tokens": 300 * conversations + 2 * 100 + 300,
        "refused": expected_refusals(),
        "warm_ups": 0,
    }


@pytest.mark.long
def test_requests_for_embeddings_are_answered_with_order_and_gate(small_model) -> None:
    flags = ("--is-embedding", *SERVER[:4], *ORDER, "--canopy-session-gate", "auto")
    results = run_scenario("embed", small_model, *flags, "--max-running-requests", "1")
    assert [answered for answered, _ in results] == [True] * 3
    assert [cached for _, cached in results] == [0, 288, 288]


@pytest.mark.long
def test_refusals_are_counted_while_sglangs_own_cache_is_observed(tiny_model) -> None:
    result = run_scenario("observe_refusals", tiny_model, "--canopy-observe", *SERVER, policy="")
    assert result == {"refused": expected_refusals(), "metered_tokens": 2 * 100 + 300}


@pytest.mark.long
def test_a_scheduler_with_sglangs_lru_is_metered(small_model) -> None:
    flags = ("--canopy-observe", *SERVER[:4], *LIMIT_FLAGS)
    stats = run_scenario("read_meter", small_model, *flags, policy="")
    assert stats["equal"]
    meter = stats["meter"]
    assert meter["running"] == "lru"
    assert meter["sampled_requests"] > 60  # the others have no full block
    hit_ratios = {(arm["policy"], arm["capacity"]): arm["hit_ratio"] for arm in meter["arms"]}
    assert {policy for policy, _ in hit_ratios} == {"lru", "canopy-lru", "wa"}
    assert hit_ratios["lru", "now"] == pytest.approx(meter["hit_ratio"], abs=1e-4)
    assert 0 < hit_ratios["lru", "now"] <= hit_ratios["lru", "device x2"]
