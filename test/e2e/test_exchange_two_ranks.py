"""Exchanges of policies on a real server of two ranks: under load, and back by itself."""

from __future__ import annotations

import json
import os
import random
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from support.prompts import token_ids

PAGE = 16
KV_TOKENS = 1536
PATIENCE_S = 60.0
RETURN_S = 600.0
TENANTS = [f"team{number}" for number in range(8)]
CHANGES: tuple[dict[str, Any], ...] = (
    {"device": "canopy-lru"},
    {"device": "wa", "host": "canopy-lru"},
    {"device": "threshold-lru"},
    {"device": "wa"},
)


@pytest.fixture
def client(shared_server, tiny_model):
    cores = sorted(os.sched_getaffinity(0))
    return shared_server(
        tiny_model,
        *("--tp-size", "2", "--radix-eviction", "wa", "--page-size", str(PAGE)),
        *("--enable-hierarchical-cache", "--hicache-ratio", "1.5"),
        *("--canopy-whatif", "auto"),
        kv_tokens=KV_TOKENS,
        ready_s=480.0,  # two ranks, and perhaps one core
        environment={"SGLANG_CPU_OMP_THREADS_BIND": f"{cores[0]}|{cores[-1]}"},
    )


def conversations(requests: int, seed: int) -> list[tuple[list[int], str, dict[str, Any]]]:
    """Prompts of growing conversations of eight tenants, in random order."""
    draw, made = random.Random(seed), []
    talks: dict[int, list[int]] = {}
    for _ in range(requests):
        who = draw.randrange(16)
        talk = talks.setdefault(who, [])
        if len(talk) > 500:
            talk.clear()
        talk.extend(token_ids(draw.randrange(48, 112), draw.randrange(10**6)))
        made.append((list(talk), TENANTS[who % 8], {"canopy_conversation": f"c{who}"}))
    return made


def first_rank(client: Any) -> dict[str, Any]:
    (rank,) = json.loads(client.get("/canopy/status"))["ranks"]
    return rank


def once(found: Callable[[], Any], patience_s: float = PATIENCE_S) -> Any:
    """What ``found`` returns once it is true."""
    deadline = time.monotonic() + patience_s
    while not (it := found()):
        assert time.monotonic() < deadline, "not in time"
        time.sleep(0.2)
    return it


def agreed(client: Any) -> dict[str, Any] | None:
    """The first rank's status, if both have evicted equally many leaves."""
    rank = first_rank(client)
    (peer,) = rank["peers"]
    return rank if rank["agreement"]["victims"] == peer["victims"] else None


def serve_all(client: Any, asked: list, changes: tuple[dict[str, Any], ...]) -> list[str]:
    """Three clients at once; the changes are made while they are served."""

    def ask(one: tuple[list[int], str, dict[str, Any]]) -> str:
        return client.generate(one[0], 4, custom_params=one[2], extra_key=one[1])["text"]

    with ThreadPoolExecutor(3) as pool:
        asking = [pool.submit(ask, one) for one in asked]
        for number, change in enumerate(changes):
            asking[(number + 1) * len(asked) // (len(changes) + 1)].result()
            assert client.post("/canopy/policy", change)["replicas"] == 1
        return [one.result() for one in asking]


@pytest.mark.long
def test_under_load_every_answer_is_that_of_the_server_that_never_switched(client) -> None:
    asked = conversations(100, seed=4)
    before = serve_all(client, asked, ())
    assert first_rank(client)["policy_changes"] == []
    client.flush()
    assert serve_all(client, asked, CHANGES) == before
    rank = once(lambda: agreed(client))
    (peer,) = rank["peers"]
    assert peer.pop("peer") == "tp1"
    assert peer == rank["agreement"]  # the same leaves went, in the same order
    assert rank["agreement"]["victims"] > 20
    changes = rank["policy_changes"]
    posted = [one["after"] for one in changes if one["why"].startswith("POST")]  # not the floor's
    assert posted == ["canopy-lru", "wa", "threshold-lru", "wa"]
    assert "Traceback" not in client.server.log_text()


@pytest.mark.long
def test_no_kv_is_lost_by_an_exchange(client) -> None:
    """What fits is found whole after each exchange, where a request before it was."""
    prompts = [(token_ids(256, 50 + number), TENANTS[number]) for number in range(4)]
    for ids, tenant in prompts:
        client.generate(ids, extra_key=tenant)
    for change in (None, *CHANGES, {"device": "canopy-lru"}):
        if change is not None:
            client.post("/canopy/policy", change)
        for ids, tenant in prompts:
            assert client.cached(ids, extra_key=tenant)["device"] == 256 - PAGE, change


@pytest.mark.long
def test_a_better_lru_comes_back_by_itself(client) -> None:
    longer = {"device": "threshold-lru", "device_config": {"threshold_tokens": 400}}
    client.post("/canopy/policy", longer)
    once(lambda: first_rank(client)["running"] == "threshold-lru")
    # A short prompt is used every other time; the policy keeps longer ones.
    hot, step, until = token_ids(256, 3), 0, time.monotonic() + RETURN_S
    while (rank := first_rank(client))["running"] == "threshold-lru":
        assert time.monotonic() < until, rank["whatif"]
        for _ in range(10):
            step += 1
            client.generate(hot if step % 2 else token_ids(512, 1000 + step))
    assert rank["running"] == "canopy-lru"
    last = rank["policy_changes"][-1]
    assert (last["before"], last["after"]) == ("threshold-lru", "canopy-lru")
    assert last["why"] == "threshold-lru is behind canopy-lru"
    rank = once(lambda: agreed(client))
    (peer,) = rank["peers"]
    assert peer["victims_digest"] == rank["agreement"]["victims_digest"]
