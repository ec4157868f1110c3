"""Two pipeline stages: each evicts alike, on the device and in host memory; same text."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from support.prompts import token_ids
from support.small_models import LLAMA, write_model

HEADS = [token_ids(300, seed) for seed in range(1, 6)]
STAGES = ("--pp-size", "2")
CORES = {"SGLANG_CPU_OMP_THREADS_BIND": "0|1"}


def said(client: Any) -> tuple[list[Any], int]:
    answers = [client.generate(HEADS[i % 5] + token_ids(12, 60 + i), 6) for i in range(15)]
    found = sum(answer["meta_info"]["cached_tokens"] for answer in answers)
    return [answer["output_ids"] for answer in answers], found


@pytest.mark.long
def test_stages_evict_alike_and_say_the_same(server, smollm2, tmp_path: Path) -> None:
    model = write_model(tmp_path / "model", smollm2, LLAMA)
    options = {"environment": CORES, "kv_tokens": 1024}
    host = ("--enable-hierarchical-cache", "--hicache-ratio", "3")
    with server(model, *STAGES, "--radix-eviction", "lru", **options) as client:
        expected, _ = said(client)
    with server(model, *STAGES, *host, "--radix-eviction", "wa", **options) as client:
        answers, found = said(client)
        assert answers == expected
        assert found >= 10 * 300, "what left the device came back from the host"
        deadline = time.monotonic() + 60.0
        while True:  # each stage writes its status once a second
            (rank,) = json.loads(client.get("/canopy/status"))["ranks"]
            mine, (peer,) = rank["agreement"], rank["peers"]
            if mine["victims"] == peer["victims"] > 0:
                break
            assert time.monotonic() < deadline, (mine, peer)
            time.sleep(0.1)
        assert peer["victims_digest"] == mine["victims_digest"]
        assert "Traceback" not in client.server.log_text()
