"""The meter in SGLang's own scheduler, a real model computing."""

from pathlib import Path
from typing import Any

import pytest

from support.worker import worked

PATIENCE_S = 600
COMMON = ("--page-size", "16", "--chunked-prefill-size", "256", "--max-running-requests", "3")


def scheduled(model: Path, *arguments: str) -> dict[str, Any]:
    return worked("whatif_worker", model, *COMMON, *arguments, patience_s=PATIENCE_S)


@pytest.mark.long
@pytest.mark.timeout(PATIENCE_S)
def test_the_meter_changes_no_answer(small_model) -> None:
    found = scheduled(
        small_model,
        *("--radix-eviction", "wa", "--canopy-whatif", "auto"),
        *("--enable-hierarchical-cache", "--hicache-ratio", "1.5"),
    )
    assert found["equal"]
    assert found["meter"]["sampled_requests"] > 60  # the others have no full block
    assert {arm["capacity"] for arm in found["meter"]["arms"]} == {"now", "host x2"}


@pytest.mark.long
@pytest.mark.timeout(PATIENCE_S)
def test_a_scheduler_with_sglangs_lru_is_watched(small_model) -> None:
    found = scheduled(small_model, "--canopy-observe")
    assert found["equal"]
    meter = found["meter"]
    assert meter["running"] == "lru"
    assert meter["sampled_requests"] > 60  # the others have no full block
    arms = {(arm["policy"], arm["capacity"]): arm["hit_ratio"] for arm in meter["arms"]}
    assert {policy for policy, _ in arms} == {"lru", "canopy-lru", "wa"}
    assert arms["lru", "now"] == pytest.approx(meter["hit_ratio"], abs=1e-4)
    assert 0 < arms["lru", "now"] <= arms["lru", "device x2"]
