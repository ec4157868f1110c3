"""Every time in a public answer is an epoch time or an age, and its name tells which."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

from support.prompts import token_ids

FLAGS = (
    *("--radix-eviction", "auto", "--canopy-chunks", "on", "--enable-hierarchical-cache"),
    *("--hicache-ratio", "2"),
)
NEAR_S = 1000.0
"""Distance from a clock within which a number is a time of that clock."""


def numbers(value: Any, name: str = "") -> Iterator[tuple[str, float]]:
    """Every number of an answer with the name of its field."""
    if isinstance(value, dict):
        for key, one in value.items():
            yield from numbers(one, str(key))
    elif isinstance(value, list):
        for one in value:
            yield from numbers(one, name)
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        yield name, float(value)


def test_the_names_of_times_tell_their_clock(server, smollm2) -> None:
    with server(smollm2, *FLAGS, kv_tokens=1024) as client:
        answers = {}
        for turn in range(6):
            fields = {"canopy_conversation": "c", "canopy_category": "agent", "canopy_turn": turn}
            client.generate(token_ids(300 + 40 * turn, 3), 4, fields)
            client.generate(token_ids(400, 50 + turn), 4)
        hint = {"conversation": "c", "return_in_s": 5}
        answers["POST /canopy/hint"] = client.post("/canopy/hint", hint)
        answers["POST /canopy/policy"] = client.post("/canopy/policy", {"device": "canopy-lru"})
        time.sleep(3.0)  # statuses are written once a second
        for path in ("/canopy/status", "/canopy/explain?conversation=c", "/canopy/chunks"):
            answers[f"GET {path.partition('?')[0]}"] = json.loads(client.get(path))
        document = {"text": "a document of a few words " * 40}
        answers["POST /canopy/chunks"] = client.post("/canopy/chunks", document)
    status = answers["GET /canopy/status"]["ranks"][0]
    assert status["policy_changes"][-1]["time_unix_s"] > time.time() - 60
    assert answers["GET /canopy/explain"]["replicas"][0][0]["last_use_ago_s"] < 60
    epochs = 0
    for route, answer in answers.items():
        for name, value in numbers(answer):
            assert "time" not in name.split("_")[-1:], f"{route}: {name} names no clock"
            if name.endswith("_unix_s"):
                epochs += 1
                assert abs(value - time.time()) < 2 * 3600, (route, name, value)
                continue
            assert abs(value - time.time()) > NEAR_S, (route, name, value)
            if name.endswith("_ago_s"):
                assert 0.0 <= value < 600.0, (route, name, value)
            elif value != int(value):  # a count may be near the monotonic clock by chance
                assert abs(value - time.monotonic()) > NEAR_S, (route, name, value)
    assert epochs >= 4
