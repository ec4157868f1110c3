"""Two tensor-parallel ranks over three tiers: they evict alike, and pages keep their metadata."""

import json
import os
import random
import re
import time
from typing import Any

import pytest

from support.prompts import token_ids

PAGE = 16
REQUESTS = 500
PATIENCE_S = 60.0
CATEGORIES = ("chat", "agent", "batch")


def conversations(requests: int, seed: int, turns: int = 5) -> list[tuple[list[int], dict]]:
    """Prompts of conversations that grow turn by turn, in random order; a third share a head."""
    draw = random.Random(seed)
    shared = token_ids(64, seed)
    waiting: list[list[tuple[list[int], dict]]] = []
    for number in range(-(-requests // turns)):
        tokens = list(shared) if number % 3 == 0 else []
        talk = []
        for turn in range(1, turns + 1):
            tokens = tokens + [draw.randrange(100, 40_000) for _ in range(draw.randrange(16, 48))]
            said = {
                "canopy_category": CATEGORIES[number % 3],
                "canopy_turn": turn,
                "canopy_conversation": f"c{number}",
            }
            talk.append((tokens, said))
        waiting.append(talk)
    mixed = []
    while waiting:
        talk = draw.choice(waiting[:20])  # twenty at a time
        mixed.append(talk.pop(0))
        waiting = [talk for talk in waiting if talk]
    return mixed[:requests]


def ranks_of(client: Any) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """The first rank's status, and what must be equal on both: the first's and its peer's."""
    (first,) = json.loads(client.get("/canopy/status"))["ranks"]
    (peer,) = first["peers"]
    assert peer.pop("peer") == "tp1"
    return first, first["agreement"], peer


def settled(client: Any, requests: int) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """The same once both ranks have reported on ``requests`` requests."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        found = ranks_of(client)
        served = sum(row["requests"] for row in found[0]["categories"])
        if served >= requests and found[1]["victims"] == found[2]["victims"]:
            return found
        assert time.monotonic() < deadline, found[1:]
        time.sleep(0.2)


@pytest.fixture
def client(shared_server, tiny_model, tmp_path_factory):
    cores = sorted(os.sched_getaffinity(0))  # SGLang needs the cores of each rank
    disk = tmp_path_factory.getbasetemp() / "two-ranks-disk"
    storage = {"prefetch_threshold": PAGE, "path": str(disk), "capacity_gb": 1}
    return shared_server(
        tiny_model,
        *("--tp-size", "2", "--radix-eviction", "wa", "--page-size", str(PAGE)),
        *("--enable-hierarchical-cache", "--hicache-ratio", "1.5"),
        *("--hicache-storage-backend", "canopy"),
        *("--hicache-storage-prefetch-policy", "wait_complete"),
        *("--hicache-storage-backend-extra-config", json.dumps(storage)),
        kv_tokens=1024,
        environment={"SGLANG_CPU_OMP_THREADS_BIND": f"{cores[0]}|{cores[-1]}"},
    )


@pytest.mark.long
def test_both_ranks_evict_the_same_leaves_over_500_requests(client) -> None:
    asked = conversations(REQUESTS, seed=1)
    hits = {"device": 0, "host": 0, "storage": 0}
    for tokens, said in asked:
        found = client.generate(tokens, custom_params=said)["meta_info"]["cached_tokens_details"]
        for tier in hits:
            hits[tier] += (found or {}).get(tier, 0)
    assert min(hits.values()) > 0, hits
    status, first, second = settled(client, REQUESTS)
    assert first["victims"] > REQUESTS
    assert first == second
    assert first["records_compared"] > 0
    assert status["policies"] == {"device": "wa", "host": "wa", "disk": "wa"}
    assert "Traceback" not in client.server.log_text()


def entered_host(client: Any, category: str) -> float:
    """Return the category's tokens that entered the host: computed, or read with their metadata."""
    line = re.compile(r"^canopy:entered_tokens_total\{(.*)\} (\S+)$", re.MULTILINE)
    for labels, value in line.findall(client.get("/metrics")):
        if 'tier="host"' in labels and f'category="{category}"' in labels:
            return float(value)
    return 0.0


@pytest.mark.long
def test_metadata_is_restored_with_every_read_from_disk(client) -> None:
    said = {"canopy_category": "kept"}
    prompt = token_ids(20 * PAGE, seed=7)
    client.generate(prompt, custom_params=said)
    for read in range(1, 5):
        # Pages that are read without their records count as "default".
        wanted = read * len(prompt)
        deadline = time.monotonic() + PATIENCE_S
        while (entered := entered_host(client, "kept")) < wanted:
            assert time.monotonic() < deadline, (read, entered, ranks_of(client)[1:])
            time.sleep(0.2)
        assert entered == wanted
        client.flush()
        answer = client.generate([*prompt, read], custom_params=said)
        assert answer["meta_info"]["cached_tokens_details"]["storage"] == len(prompt), read
