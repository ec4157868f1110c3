"""Adapters served by a real server on all three tiers: same text as SGLang's own policy."""

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from support.prompts import token_ids
from support.small_models import LLAMA, write_adapter, write_model

POOL = 900
PAGE = 4
HEAD = 300
PAGES = HEAD // PAGE
ADAPTERS = ("law", "tax", None)


def said(client: Any, prompts: list[list[int]], rounds: int) -> tuple[list[Any], dict[str, list]]:
    """Return the answers of every prompt under every adapter, and the cached tokens of each."""
    answers, found = [], {str(adapter): [] for adapter in ADAPTERS}
    for number in range(rounds):
        for prompt in prompts:
            for adapter in ADAPTERS:
                lora = {} if adapter is None else {"lora_path": adapter}
                answer = client.generate(prompt + token_ids(4, 90 + number), 8, **lora)
                answers.append(answer["output_ids"])
                found[str(adapter)].append(answer["meta_info"]["cached_tokens"])
    return answers, found


def settled(client: Any, done: Callable[[dict[str, Any]], bool]) -> None:
    """Wait until the status, which is updated once a second, satisfies ``done``."""
    deadline = time.monotonic() + 60.0
    while not done(rank := json.loads(client.get("/canopy/status"))["ranks"][0]):
        assert time.monotonic() < deadline, rank
        time.sleep(0.1)


@pytest.mark.long
def test_adapters_answer_as_under_lru_and_never_share_kv(server, smollm2, tmp_path: Path) -> None:
    model = write_model(tmp_path / "model", smollm2, LLAMA)
    paths = [f"{a}={write_adapter(tmp_path / a, model, n)}" for n, a in enumerate(ADAPTERS[:2])]
    given = ("--enable-lora", "--lora-paths", *paths, "--lora-backend", "torch_native")
    extra = {"path": str(tmp_path / "disk"), "capacity_gb": 0.1, "prefetch_threshold": 16}
    tiers = (
        *("--enable-hierarchical-cache", "--hicache-ratio", "4", "--page-size", str(PAGE)),
        *("--hicache-storage-backend", "canopy"),
        *("--hicache-storage-prefetch-policy", "wait_complete"),
        *("--hicache-storage-backend-extra-config", json.dumps(extra)),
    )
    one = [token_ids(HEAD, seed=1)]
    prompts = [*one, *(token_ids(HEAD, seed) for seed in (2, 3))]
    with server(model, *given, "--radix-eviction", "lru", kv_tokens=POOL) as client:
        expected, _ = said(client, prompts, rounds=3)
    assert len({json.dumps(answer) for answer in expected[:3]}) == 3, "adapters change nothing"
    with server(model, *given, *tiers, "--radix-eviction", "wa", kv_tokens=POOL) as client:
        answers, found = said(client, prompts, rounds=3)
        assert answers == expected
        for adapter, cached in found.items():
            assert cached[:3] == [0, 0, 0], (adapter, "found another adapter's KV")
            assert min(cached[3:]) >= HEAD, (adapter, cached)
        counts = {"law": 9, "tax": 9}
        settled(
            client, lambda rank: {r["adapter"]: r["requests"] for r in rank["adapters"]} == counts
        )
        assert 'canopy:adapter_requests_total{adapter="law"' in client.get("/metrics")
        assert "Traceback" not in client.server.log_text()
        # Pages on disk are read only by their own adapter.
        settled(client, lambda rank: rank["disk"]["pages"] >= 9 * PAGES)
        client.flush()
        again, _ = said(client, prompts, rounds=1)
        assert again == expected[: len(again)]
        client.flush()
        assert client.cached(one[0], lora_path="tax")["storage"] > HEAD - 2 * PAGE
