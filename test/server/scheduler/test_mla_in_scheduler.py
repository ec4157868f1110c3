"""A DeepSeek-shaped model (MLA) in SGLang's own scheduler: same text on two tiers as with ``lru``."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from support.prompts import token_ids
from support.small_models import DEEPSEEK_V2, write_model
from support.worker import worked

PATIENCE_S = 900
HEADS = [token_ids(700, seed) for seed in range(8)]
ROUNDS = [[head + token_ids(20, 90 + number)] for number in range(3) for head in HEADS]


def scheduled(model: Path, *arguments: str) -> dict[str, Any]:
    given = ("--load-format", "auto", "--page-size", "16", *arguments)
    return worked("scheduled_answers", model, *given, patience_s=PATIENCE_S, given=ROUNDS)


@pytest.mark.long
@pytest.mark.timeout(PATIENCE_S)
def test_mla_answers_are_unchanged_from_device_and_host(smollm2, tmp_path) -> None:
    model = write_model(tmp_path / "model", smollm2, DEEPSEEK_V2)
    tiers = ("--enable-hierarchical-cache", "--hicache-ratio", "3")
    with ThreadPoolExecutor(2) as both:
        running = [
            both.submit(scheduled, model, "--radix-eviction", *arguments)
            for arguments in (("lru",), ("wa", *tiers))
        ]
    stock, ours = (one.result() for one in running)
    assert len(set(map(tuple, stock["answers"]))) > len(HEADS), "prompts change nothing"
    assert ours["answers"] == stock["answers"]
    assert ours["victims"] > 0
    assert sum(host for _, host, _ in ours["found"]) > 0
    assert sum(map(sum, ours["found"])) > sum(map(sum, stock["found"]))
