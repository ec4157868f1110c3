"""SGLang's overlapped loop under random arrivals, aborts, changes of the order, pauses, flushes and retraction."""

from pathlib import Path
from typing import Any

import pytest

from support import chaos_setups
from support.hybrid_models import build
from support.worker import worked

PATIENCE_S = 900
HELD = ("unserved", "waiting", "in_queue", "in_gate", "locked", "slots")
SHORT = "order, gate and priorities"


def chaos(model: Path, name: str, folder: Path, steps: int, seed: int = 0) -> dict[str, Any]:
    arguments = chaos_setups.arguments(name, folder)
    counted = (str(seed), str(steps), *arguments)
    environment = chaos_setups.environment(name)
    found = worked("chaos_worker", model, *counted, patience_s=PATIENCE_S, **environment)
    print(name, found)
    assert found["wrong"] == 0, found
    assert found["other_from_wrong_kv"] >= 4, found  # wrong KV gives wrong answers
    assert not any(found[what] for what in HELD), found
    assert found.get("over_bound", 0) == 0, found
    # The loop did overlap, and the life was eventful.
    assert found["turns_in_flight"] > steps / 2, found
    assert found["answered"] > steps / 8, found
    assert min(found[some] for some in ("aborts", "orders", "pauses", "samples", "hints")) > 0
    return found


@pytest.mark.timeout(PATIENCE_S)
def test_overlapped_answers_are_right_while_the_order_changes(small_model, tmp_path) -> None:
    found = chaos(small_model, SHORT, tmp_path, steps=80)
    assert found["delayed_sessions"] > 0


@pytest.mark.long
@pytest.mark.timeout(PATIENCE_S)
@pytest.mark.parametrize("name", [name for name in chaos_setups.DENSE if name != SHORT])
def test_overlapped_answers_are_right_in_every_dense_set_up(small_model, tmp_path, name) -> None:
    found = chaos(small_model, name, tmp_path, steps=300, seed=1)
    assert found["flushes"] > 0
    if "retraction" in name:
        assert found["retracted"] > 0


@pytest.mark.long
@pytest.mark.timeout(PATIENCE_S)
@pytest.mark.parametrize("name", chaos_setups.HYBRID)
def test_overlapped_answers_are_right_with_hybrid_models(smollm2, tmp_path, name) -> None:
    kind, _ = chaos_setups.HYBRID[name]
    build(kind, tmp_path / kind, smollm2)
    chaos(tmp_path / kind, name, tmp_path, steps=300, seed=2)
