"""The what-if meter on real servers: under SGLang's own policy, and under one of Canopy's."""

from __future__ import annotations

import json
import random
import re
import time
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
    """The meter, once it has heard of ``requests`` requests."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        status = json.loads(client.get("/canopy/status"))
        if status["whatif"] and status["whatif"]["sampled_requests"] >= requests:
            return status
        assert time.monotonic() < deadline, status
        time.sleep(0.2)


@pytest.mark.long
def test_a_server_under_sglangs_lru_is_watched_and_answers_as_without(server, tiny_model):
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
            assert "lru hits" in status["whatif_in_words"]
            time.sleep(1.5)
            found = re.findall(r"^canopy:whatif_hit_ratio\{(.*)\}", client.get("/metrics"), re.M)
            assert len(found) == len(arms)
            assert "Traceback" not in client.server.log_text()
    assert answers[0] == answers[1]
