"""A DeepSeek-shaped model (MLA) on device, host and disk: same text as SGLang's own policy."""

import json
import time
from pathlib import Path
from typing import Any

import pytest

from support.prompts import token_ids
from support.small_models import DEEPSEEK_V2, write_model

PAGE = 16
HEADS = [token_ids(320, seed) for seed in (1, 2, 3, 4)]


def said(client: Any, rounds: int) -> tuple[list[Any], int]:
    """The answers of prompts that share beginnings, and the tokens that any tier had of them."""
    answers, found = [], 0
    for number in range(rounds):
        for head in HEADS:
            answer = client.generate(head + token_ids(20, 90 + number), 8)
            answers.append(answer["output_ids"])
            found += answer["meta_info"]["cached_tokens"]
    return answers, found


@pytest.mark.long
def test_mla_answers_are_unchanged_from_three_tiers(server, smollm2, tmp_path: Path) -> None:
    model = write_model(tmp_path / "model", smollm2, DEEPSEEK_V2)
    extra = {"path": str(tmp_path / "disk"), "capacity_gb": 0.1, "prefetch_threshold": 16}
    tiers = (
        *("--enable-hierarchical-cache", "--hicache-ratio", "3", "--page-size", str(PAGE)),
        *("--hicache-storage-backend", "canopy"),
        *("--hicache-storage-prefetch-policy", "wait_complete"),
        *("--hicache-storage-backend-extra-config", json.dumps(extra)),
    )
    with server(model, "--radix-eviction", "lru", kv_tokens=8192) as client:
        expected, everything = said(client, rounds=3)
    assert len({json.dumps(answer) for answer in expected}) > len(HEADS), "prompts change nothing"
    with server(model, *tiers, "--radix-eviction", "wa", kv_tokens=800) as client:
        answers, found = said(client, rounds=3)
        assert answers == expected
        assert found == everything, "what left the device came back from the host"
        (rank,) = json.loads(client.get("/canopy/status"))["ranks"]
        assert rank["tiers"]["device"]["evicted_tokens"]["capacity"] > 0
        deadline = time.monotonic() + 60.0
        while json.loads(client.get("/canopy/status"))["ranks"][0]["disk"]["pages"] < 80:
            assert time.monotonic() < deadline, "pages are not written"
            time.sleep(0.1)
        client.flush()
        assert client.cached(HEADS[0] + [5], tokens=1)["storage"] == 320
        client.flush()
        again, _ = said(client, rounds=1)
        assert again == expected[: len(again)]
        assert "Traceback" not in client.server.log_text()
