"""Conversations with documents on SGLang's own scheduler, while requests are aborted and retracted, KV goes
to host memory and disk and back, and the weights are updated."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from support.overlapped import OVERLAP
from support.small_models import LLAMA, write_model
from support.worker import worked

PATIENCE_S = 1500
COMMON = (
    *("--radix-eviction", "wa", "--page-size", "16", "--chunked-prefill-size", "128"),
    *("--max-running-requests", "4", "--max-total-tokens", "1024"),
    *("--enable-hierarchical-cache", "--hicache-write-policy", "write_back"),
)
EVENTS = (
    *("samples", "aborts", "retracted", "updates", "approximate"),
    *("fused_requests", "kept_requests", "replanned_requests"),
    *("exact_from_host", "kept_from_host", "documents_from_host", "documents_from_disk"),
)
HELD = ("waiting", "in_queue", "locked", "slots")


@pytest.fixture(scope="module")
def model(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("models") / "llama", smollm2, LLAMA)


def churn(model: Path, folder: Path, steps: int, *arguments: str) -> dict[str, Any]:
    """Run the worker, with three updates of the weights; check what always holds."""
    store = {"memory_mb": 1, "disk_mb": 16, "directory": str(folder / "documents")}
    keys = json.dumps({**store, "learn_share": 1.0})
    found = worked(
        *("documents_worker", model, "0", str(steps), str(steps // 3), *COMMON),
        *("--canopy-chunks", keys, *arguments),
        patience_s=PATIENCE_S, SGLANG_TEST_RETRACT="1",
    )  # fmt: skip
    print(found)
    assert found["wrong"] == found["fallbacks"] == 0, found
    assert not any(found[name] for name in HELD), found
    assert all(found[name] for name in EVENTS), found
    return found


@pytest.mark.long
@pytest.mark.timeout(PATIENCE_S)
@pytest.mark.parametrize("overlap", [(), (OVERLAP,)], ids=["in turn", "overlapped"])
def test_exact_answers_stay_exact_next_to_kept_kv(model: Path, tmp_path: Path, overlap) -> None:
    churn(model, tmp_path, 300, "--hicache-ratio", "4", *overlap)


@pytest.mark.long
@pytest.mark.timeout(PATIENCE_S)
def test_kept_kv_and_exact_kv_are_loaded_from_disk(model: Path, tmp_path: Path) -> None:
    extra = {"path": str(tmp_path / "kv"), "capacity_gb": 0.1, "prefetch_threshold": 16}
    disk = (
        *("--hicache-ratio", "1.1", "--hicache-storage-backend", "canopy"),
        *("--hicache-storage-prefetch-policy", "wait_complete"),
        *("--hicache-storage-backend-extra-config", json.dumps(extra)),
    )
    found = churn(model, tmp_path, 600, *disk, OVERLAP)
    assert found["exact_from_disk"], found
    assert found["kept_from_disk"], found
