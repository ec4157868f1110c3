"""Random operations on SGLang's own scheduler, in turn and overlapped: right answers, and nothing remains."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from support import hybrid_models
from support.scheduler import OVERLAP_FLAG
from support.small_models import LLAMA, write_model
from support.worker import run_in_scheduler_process

RUN_TIMEOUT_S = 1500
PAGE_FLAGS = ("--page-size", "64", "--chunked-prefill-size", "256", "--max-running-requests", "2")
ORDER_FLAGS = ("--canopy-queue-order", "bounded-shortest")
GATE_FLAGS = ("--canopy-session-gate", "auto")
PRIORITIES = ("--enable-priority-scheduling", "--default-priority-value", "0")
WRITE_BACK = ("--enable-hierarchical-cache", "--hicache-write-policy", "write_back")
SMALL_HOST = (*WRITE_BACK, "--hicache-ratio", "3", "--max-total-tokens", "2560")
DISK = ("--hicache-storage-backend", "canopy", "--hicache-storage-prefetch-policy", "wait_complete")
THREE_RUNNING = ("--max-running-requests", "3")
DOCUMENT_FLAGS = (
    *("--page-size", "16", "--chunked-prefill-size", "128", "--max-running-requests", "4"),
    *("--max-total-tokens", "1024", *WRITE_BACK),
)
MIX = {"arrive": 0.5, "leave": 0.15, "change_order": 0.06, "pause": 0.04, "hint": 0.1, "flush": 0.3}
LEAVING_ACTIONS = {"arrive": 0.5, "leave": 0.3}
DOCUMENT_TURNS = {"turn_with_documents": 0.5, "leave": 0.1}
RETRACTS = {"SGLANG_TEST_RETRACT": "1"}


@dataclass(slots=True, frozen=True)
class SetUp:
    flags: tuple[str, ...]
    actions: dict[str, float] = field(default_factory=MIX.copy)
    steps: int = 300
    model: str = "dense"
    environment: dict[str, str] = field(default_factory=dict)
    further_events: tuple[str, ...] = ()
    """Counts that must be above 0, besides those of ``EVENTS_BY_ACTION``."""


SETUPS = {
    "clients leave, order, gate, priorities": SetUp((*PAGE_FLAGS, *ORDER_FLAGS, *GATE_FLAGS, *PRIORITIES), LEAVING_ACTIONS),
    "all, order, gate, priorities": SetUp((*PAGE_FLAGS, *ORDER_FLAGS, *GATE_FLAGS, *PRIORITIES, OVERLAP_FLAG), steps=80),
    "clients leave, order, gate": SetUp((*PAGE_FLAGS, *ORDER_FLAGS, *GATE_FLAGS, OVERLAP_FLAG), LEAVING_ACTIONS),
    "clients leave, order, priorities, a limit": SetUp(
        (*PAGE_FLAGS, *ORDER_FLAGS, *PRIORITIES, "--max-queued-requests", "3"), LEAVING_ACTIONS, further_events=("refused",)
    ),
    "clients leave, hrrn": SetUp((*PAGE_FLAGS, "--schedule-policy", "hrrn"), LEAVING_ACTIONS),
    "clients leave, hrrn, gate": SetUp((*PAGE_FLAGS, "--schedule-policy", "hrrn", *GATE_FLAGS), LEAVING_ACTIONS),
    "clients leave, gate": SetUp((*PAGE_FLAGS, *GATE_FLAGS), LEAVING_ACTIONS),
    "all": SetUp((*PAGE_FLAGS, OVERLAP_FLAG), further_events=("flushes",)),
    "all, order, retraction": SetUp(
        (*PAGE_FLAGS, *ORDER_FLAGS, OVERLAP_FLAG), environment=RETRACTS, further_events=("retracted", "flushes")
    ),
    "all, order, gate, host": SetUp(
        (*PAGE_FLAGS, *ORDER_FLAGS, *GATE_FLAGS, *SMALL_HOST, OVERLAP_FLAG), further_events=("flushes",)
    ),
    "all, order, host, disk": SetUp(
        (*PAGE_FLAGS, *ORDER_FLAGS, *SMALL_HOST, *DISK, OVERLAP_FLAG), further_events=("flushes",)
    ),
    # With recurrent states SGLang turns the overlap off.
    "all, windows": SetUp((*THREE_RUNNING, OVERLAP_FLAG), model="windows"),
    "all, windows, host": SetUp(
        (*THREE_RUNNING, "--enable-hierarchical-cache", "--hicache-ratio", "6", OVERLAP_FLAG), model="windows"
    ),
    "documents": SetUp((*DOCUMENT_FLAGS, "--hicache-ratio", "4"), DOCUMENT_TURNS, 300, "llama", RETRACTS),
    "documents, overlap": SetUp(
        (*DOCUMENT_FLAGS, "--hicache-ratio", "4", OVERLAP_FLAG), DOCUMENT_TURNS, 300, "llama", RETRACTS
    ),
    "documents, disk": SetUp(
        (*DOCUMENT_FLAGS, "--hicache-ratio", "1.1", *DISK, OVERLAP_FLAG), DOCUMENT_TURNS, 1200, "llama", RETRACTS,
        further_events=("exact_from_disk", "kept_from_disk"),
    ),
}  # fmt: skip
DEFAULT_SETUPS = list(SETUPS)[:2]
REMAINING_COUNTS = ("unserved", "waiting", "in_queue", "in_gate", "locked", "slots")
EVENTS_BY_ACTION = {
    "leave": ("aborts",),
    "change_order": ("orders",),
    "pause": ("pauses",),
    "hint": ("hints",),
    "turn_with_documents": (
        *("samples", "retracted", "updates", "approximate", "fused_requests", "kept_requests"),
        *("replanned_requests", "exact_from_host", "kept_from_host"),
        *("documents_from_host", "documents_from_disk"),
    ),
}


def run_setup(setup: SetUp, model: Path, folder: Path, seed: int) -> dict[str, Any]:
    flags = ["--radix-eviction", "wa", *setup.flags]
    if DISK[1] in flags:
        disk_config = {"path": str(folder / "disk"), "capacity_gb": 0.1}
        disk_config["prefetch_threshold"] = 16 if setup.model == "llama" else 64
        flags += ["--hicache-storage-backend-extra-config", json.dumps(disk_config)]
    if setup.model == "llama":
        store = {"memory_mb": 1, "disk_mb": 16, "directory": str(folder / "documents")}
        flags += ["--canopy-documents", json.dumps({**store, "learn_share": 1.0})]
    keywords = {"seed": seed, "steps": setup.steps, "actions": setup.actions}
    environment = setup.environment
    return run_in_scheduler_process(
        "fuzz:run_fuzz", model, *flags, timeout_s=RUN_TIMEOUT_S, environment=environment, **keywords
    )


def check_counts(setup: SetUp, counts: dict[str, Any]) -> None:
    assert counts["wrong"] == 0, counts
    assert not any(counts[count] for count in REMAINING_COUNTS), counts
    assert counts["answered"] > setup.steps / 8, counts
    if setup.model != "llama":
        assert counts["requests"] == 0, counts
        assert counts["changed_by_wrong_kv"] >= 4, counts  # wrong KV gives wrong answers
        if OVERLAP_FLAG in setup.flags:
            assert counts["results_in_flight"] > setup.steps / 2, counts
    for action in setup.actions:
        for event in (*EVENTS_BY_ACTION.get(action, ()), *setup.further_events):
            assert counts[event] > 0, (event, counts)
    if ORDER_FLAGS[0] in setup.flags:
        assert counts["bound_violations"] == 0 < counts["max_used_percent"], counts
    if GATE_FLAGS[0] in setup.flags and setup.actions == LEAVING_ACTIONS:
        assert counts["delayed_sessions"] > 0, counts
    if setup.actions == LEAVING_ACTIONS:
        assert min(counts[name] for name in ("aborts", "retries", "repeated_names")) > 10, counts
    assert counts.get("fallbacks", 0) == 0, counts


@pytest.mark.timeout(RUN_TIMEOUT_S)
@pytest.mark.parametrize(
    "name", [n if n in DEFAULT_SETUPS else pytest.param(n, marks=pytest.mark.long) for n in SETUPS]
)
def test_answers_are_right_and_nothing_remains(name, small_model, smollm2, tmp_path) -> None:
    setup, model = SETUPS[name], small_model
    if setup.model == "windows":
        hybrid_models.build_model("windows", model := tmp_path / "windows", smollm2)
    elif setup.model == "llama":
        model = write_model(tmp_path / "llama", smollm2, LLAMA)
    counts = run_setup(setup, model, tmp_path, seed=int(name not in DEFAULT_SETUPS))
    print(counts)
    check_counts(setup, counts)
