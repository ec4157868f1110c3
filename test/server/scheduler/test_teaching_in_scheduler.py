"""Samples, refusals and retries at SGLang's own scheduler: learning and counts."""

from pathlib import Path

import pytest

from support.teaching_worker import SAMPLES, TALKS
from support.worker import worked

PATIENCE_S = 900
SERVER = ("--page-size", "16", "--chunked-prefill-size", "256", "--max-queued-requests", "2")
REFUSED = {"invalid": 1, "queue": 1, "given_up": 2}


@pytest.mark.timeout(PATIENCE_S)
def test_only_admitted_requests_are_learnt_and_counted_once(tiny_model: Path) -> None:
    found = worked(
        "teaching_worker",
        tiny_model,
        *("--radix-eviction", "wa", "--canopy-whatif", "auto", *SERVER),
        patience_s=PATIENCE_S,
    )
    assert found["turns"] == [1] * (SAMPLES * TALKS)
    assert found["samples_learnt"] == 0
    assert found["refused_at_the_limit"]
    assert found["retried_turn"] == 1
    assert found["returns"] == 0
    assert found["requests"] == TALKS + 3
    assert found["prompt_tokens"] == found["metered_tokens"] == 300 * TALKS + 2 * 100 + 300
    assert found["refused"] == REFUSED
    assert found["warm_ups"] == 0


@pytest.mark.long
@pytest.mark.timeout(PATIENCE_S)
def test_refusals_are_counted_while_sglangs_own_cache_is_observed(tiny_model: Path) -> None:
    given = ("--canopy-observe", *SERVER)
    found = worked("teaching_worker", tiny_model, *given, patience_s=PATIENCE_S)
    assert found == {"refused": REFUSED, "metered_tokens": 2 * 100 + 300}
