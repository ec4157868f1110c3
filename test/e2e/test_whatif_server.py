"""The what-if meter on real servers: under SGLang's own policy, and under one of Canopy's."""

import json
import random
import re
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from support.prompts import token_ids

PATIENCE_S = 60.0


def conversations(requests: int, seed: int = 1) -> list[tuple[list[int], dict[str, Any]]]:
    """Prompts of growing conversations, in random order."""
    draw, made = random.Random(seed), []
    talks: dict[int, list[int]] = {}
    for _ in range(requests):
        who = draw.randrange(12)
        talk = talks.setdefault(who, [])
        if len(talk) > 500:
            talk.clear()
        talk.extend(token_ids(draw.randrange(64, 128), draw.randrange(10**6)))
        made.append((list(talk), {"canopy_conversation": f"c{who}"}))
    return made


def sampled(client: Any, requests: int) -> dict[str, Any]:
    """Return the meter's status after ``requests`` requests."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        status = json.loads(client.get("/canopy/status"))
        if status["whatif"] and status["whatif"]["sampled_requests"] >= requests:
            return status
        assert time.monotonic() < deadline, status
        time.sleep(0.2)


@pytest.mark.long
def test_a_server_under_sglangs_lru_is_observed_and_answers_are_unchanged(server, tiny_model):
    asked = conversations(60)
    answers = []
    for flags in ([], ["--canopy-observe", "--enable-metrics"]):
        with server(tiny_model, "--page-size", "16", *flags, kv_tokens=1536) as client:
            answers.append([client.generate(tokens, 4)["text"] for tokens, _ in asked])
            if not flags:
                continue
            status = sampled(client, len(asked))
            arms = {(a["policy"], a["capacity"]): a for a in status["whatif"]["arms"]}
            assert status["ranks"] == []
            assert status["whatif"]["running"] == "lru"
            assert {p for p, _ in arms} == {"lru", "canopy-lru", "wa"}
            assert arms["lru", "device x2"]["hit_ratio"] >= arms["lru", "now"]["hit_ratio"] > 0
            assert status["whatif_in_words"].startswith("lru runs; too few requests: ")
            assert status["next_step"].startswith("Nothing to decide yet: too few requests")
            time.sleep(1.5)
            found = re.findall(r"^canopy:whatif_hit_ratio\{(.*)\}", client.get("/metrics"), re.M)
            assert len(found) == len(arms)
            assert "Traceback" not in client.server.log_text()
    assert answers[0] == answers[1]


@pytest.mark.long
def test_a_canopy_server_measures_under_load_and_explains(server, tiny_model):
    """Three clients at once, on two tiers that are too small."""
    asked = conversations(90, seed=2)
    flags = ("--page-size", "16", "--enable-hierarchical-cache", "--hicache-ratio", "2")
    whatif = ("--radix-eviction", "wa", "--canopy-whatif", "auto,floor=on")
    with server(tiny_model, *flags, *whatif, kv_tokens=2048) as client:
        with ThreadPoolExecutor(3) as pool:
            list(pool.map(lambda one: client.generate(one[0], 4, custom_params=one[1]), asked))
        status = sampled(client, len(asked))
        (rank,) = status["ranks"]
        assert status["policy"] == rank["running"]
        assert sum(rank["tiers"]["device"]["evicted_tokens"].values()) > 0
        arms = {(a["policy"], a["capacity"]) for a in status["whatif"]["arms"]}
        assert ("wa", "host x2") in arms
        assert status["whatif"]["spent_s"] > 0
        told = json.loads(client.get("/canopy/explain?conversation=c1"))
        (one,) = told["replicas"][0]
        assert one["cached"]
        assert one["nodes"][-1]["offset"] >= 0
        assert "Traceback" not in client.server.log_text()
