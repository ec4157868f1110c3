"""Exchanges of policies on a real server of two ranks: under load, and by the floor."""

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
    """Return the first true value of ``found``."""
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


def posted(client: Any) -> list[str]:
    """Return the requested policies; the floor exchanges policies as well."""
    changes = first_rank(client)["policy_changes"]
    return [one["after"] for one in changes if one["why"].startswith("POST")]


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
def test_answers_under_load_equal_those_without_exchanges(client) -> None:
    asked = conversations(100, seed=4)
    before = serve_all(client, asked, ())
    assert posted(client) == []
    client.flush()
    assert serve_all(client, asked, CHANGES) == before
    rank = once(lambda: agreed(client))
    (peer,) = rank["peers"]
    assert peer.pop("peer") == "tp1"
    assert peer == rank["agreement"]  # the same leaves went, in the same order
    assert rank["agreement"]["victims"] > 20
    assert posted(client) == ["canopy-lru", "wa", "threshold-lru", "wa"]
    assert "Traceback" not in client.server.log_text()


@pytest.mark.long
def test_no_kv_is_lost_by_an_exchange(client) -> None:
    """Prompts that fit are still cached after each exchange."""
    prompts = [(token_ids(256, 50 + number), TENANTS[number]) for number in range(4)]
    for ids, tenant in prompts:
        client.generate(ids, extra_key=tenant)
    for change in (None, *CHANGES, {"device": "canopy-lru"}):
        if change is not None:
            client.post("/canopy/policy", change)
        for ids, tenant in prompts:
            assert client.cached(ids, extra_key=tenant)["device"] == 256 - PAGE, change


@pytest.mark.long
def test_a_better_lru_is_restored(client) -> None:
    client.post("/canopy/policy", {"device": "wa"})
    once(lambda: posted(client)[-1:] == ["wa"])

    def fallen() -> bool:
        last = first_rank(client)["policy_changes"][-1]
        return (last["after"], last["why"]) == ("canopy-lru", "wa is behind canopy-lru")

    # Some hundred requests of random conversations: by chance alone wa falls behind by some.
    until, seed = time.monotonic() + RETURN_S, 5
    while not fallen():
        assert time.monotonic() < until, first_rank(client)["whatif"]
        seed += 1
        for ids, tenant, params in conversations(10 * seed, seed)[-20:]:
            client.generate(ids, 4, custom_params=params, extra_key=tenant)
            if fallen():
                break
    assert first_rank(client)["running"] == "canopy-lru"
    rank = once(lambda: agreed(client))
    (peer,) = rank["peers"]
    assert peer["victims_digest"] == rank["agreement"]["victims_digest"]
