"""Speculative decoding by n-grams on device, host and disk: the text is that of SGLang's own policy."""

import json
import time
from pathlib import Path
from typing import Any

import pytest

from support.prompts import token_ids
from support.small_models import LLAMA, write_model

NGRAM = (
    *("--speculative-algorithm", "NGRAM", "--speculative-num-draft-tokens", "4"),
    # SGLang has wider trees with pages of one token only.
    *("--speculative-ngram-min-bfs-breadth", "1", "--speculative-ngram-max-bfs-breadth", "1"),
)
HEADS = [token_ids(160, seed) for seed in (1, 2, 3, 4)]
ANSWER = 24


def said(client: Any, rounds: int) -> tuple[list[Any], int, int]:
    """Answers to prompts that share beginnings, the tokens found of them, and the steps taken."""
    answers, found, steps = [], 0, 0
    for number in range(rounds):
        for head in HEADS:
            # Drafts are made from earlier answers.
            answer = client.generate(head + token_ids(20, 90 + number % 2), ANSWER)
            answers.append(answer["output_ids"])
            found += answer["meta_info"]["cached_tokens"]
            steps += answer["meta_info"].get("spec_verify_ct", ANSWER)
    return answers, found, steps


@pytest.mark.long
def test_ngram_drafts_leave_answers_unchanged_on_three_tiers(
    server, smollm2, tmp_path: Path
) -> None:
    model = write_model(tmp_path / "model", smollm2, LLAMA)
    extra = {"path": str(tmp_path / "disk"), "capacity_gb": 0.1, "prefetch_threshold": 16}
    tiers = (
        *("--enable-hierarchical-cache", "--hicache-ratio", "4"),
        *("--hicache-storage-backend", "canopy"),
        *("--hicache-storage-prefetch-policy", "wait_complete"),
        *("--hicache-storage-backend-extra-config", json.dumps(extra)),
    )
    pages = ("--page-size", "16")
    with server(model, *pages, "--radix-eviction", "lru", kv_tokens=8192) as client:
        expected, everything, _ = said(client, rounds=3)
    assert len({json.dumps(answer) for answer in expected}) > len(HEADS), "prompts change nothing"
    ours = ("--radix-eviction", "wa", *NGRAM, *tiers)
    with server(model, *pages, *ours, kv_tokens=600) as client:
        answers, found, steps = said(client, rounds=3)
        assert answers == expected
        assert found == everything, "what left the device came back from the host"
        assert steps < ANSWER * len(answers), "no draft was ever accepted"
        (rank,) = json.loads(client.get("/canopy/status"))["ranks"]
        assert rank["tiers"]["device"]["evicted_tokens"]["capacity"] > 0
        deadline = time.monotonic() + 60.0
        while json.loads(client.get("/canopy/status"))["ranks"][0]["disk"]["pages"] < 40:
            assert time.monotonic() < deadline, "pages are not written"
            time.sleep(0.1)
        client.flush()
        assert client.cached(HEADS[0] + [5], tokens=1)["storage"] == 160
        assert "Traceback" not in client.server.log_text()
