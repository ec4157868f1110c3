"""A real server with device, host and disk: causes of missed tokens sum to the misses to the token."""

import json
import os
import random
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import pytest


def status(client):
    return json.loads(client.get("/canopy/status"))["ranks"][0]


def tokens_of(rank):
    return {(cause, tier): n for cause, row in rank["missed"]["tokens"].items() for tier, n in row.items()}  # fmt: skip


@pytest.mark.long
def test_causes_sum_to_the_misses_on_three_tiers(server, tiny_model, tmp_path):
    extra = {"path": str(tmp_path / "disk"), "capacity_gb": 0.1, "prefetch_threshold": 256}
    flags = (
        *("--page-size", "16", "--radix-eviction", "wa", "--enable-metrics"),
        *("--enable-hierarchical-cache", "--hicache-ratio", "2"),
        *("--hicache-storage-backend", "canopy"),
        *("--hicache-storage-prefetch-policy", "wait_complete"),
        *("--hicache-storage-backend-extra-config", json.dumps(extra)),
    )
    draw = random.Random(1)

    def tokens(count):
        return [draw.randrange(1000, 9000) for _ in range(count)]

    prompts = [tokens(draw.randrange(200, 700)) for _ in range(6)]
    with server(tiny_model, *flags, kv_tokens=1536) as client:
        sent, said = 0, {}
        for turn in range(4):
            for number in draw.sample(range(6), 6):
                found = client.generate(prompts[number], 4, {"canopy_category": f"c{number % 2}"})
                sent += len(prompts[number])
                said.setdefault((number, tuple(prompts[number])), found["output_ids"])
                assert said[number, tuple(prompts[number])] == found["output_ids"]
                if turn % 2:
                    prompts[number] = [*prompts[number], *found["output_ids"], *tokens(40)]
        short = tokens(180)  # SGLang reads nothing so short from the disk
        for _ in range(2):
            client.generate(short, 2)
            for _ in range(6):
                client.generate(tokens(900), 2)
        client.post("/hicache/storage-backend/clear")
        client.generate(short, 2)
        same = tokens(600)
        with ThreadPoolExecutor(3) as pool:
            list(pool.map(lambda _: client.generate(same, 2), range(3)))
        sampling = {"max_new_tokens": 3, "ignore_eos": True, "n": 4}
        client.post("/generate", {"input_ids": tokens(333), "sampling_params": sampling})
        client.flush()
        client.generate(same, 2)
        sent += 3 * 180 + 12 * 900 + 4 * 600 + 333
        deadline = time.monotonic() + 30.0
        while status(client)["prompt_tokens"] < sent:
            assert time.monotonic() < deadline, (status(client)["prompt_tokens"], sent)
            time.sleep(0.2)
        asked = time.time()
        while status(client)["time_unix_s"] < asked + 0.5:  # rows and causes are of one moment
            assert time.monotonic() < deadline
            time.sleep(0.2)
        rank = status(client)
        found = tokens_of(rank)
        missed = rank["prompt_tokens"] - sum(tier["hit_tokens"] for tier in rank["tiers"].values())
        assert sum(found.values()) == missed
        assert found["never_seen", "none"] >= 12 * 900 + 600 + 333
        assert found["late", "disk"] >= 128, found
        assert found["evicted", "disk"] >= 128, found
        assert rank["missed"]["corrected_tokens"] == 0
        assert found.get(("unknown", "none"), 0) <= 0.02 * missed
        assert found["partial_page", "none"]
        assert "other_namespace" not in rank["missed"]
        shown = client.get("/metrics")
        series = {
            line.rpartition(" ")[0]: float(line.rpartition(" ")[2])
            for line in shown.splitlines()
            if line.startswith("canopy:missed_tokens_total{")
        }
        assert sum(series.values()) == missed


ADMIN = "admin-of-this-server"


def counted(client, sent):
    """The first rank's row once all prompts and their causes are in it."""
    deadline = time.monotonic() + 60.0
    while status(client)["prompt_tokens"] < sent:
        assert time.monotonic() < deadline, (status(client)["prompt_tokens"], sent)
        time.sleep(0.2)
    asked = time.time()
    while status(client)["time_unix_s"] < asked + 0.5:
        assert time.monotonic() < deadline
        time.sleep(0.2)
    return status(client)


def missed_by(rank):
    return rank["prompt_tokens"] - sum(tier["hit_tokens"] for tier in rank["tiers"].values())


@pytest.mark.long
def test_causes_sum_to_the_misses_on_two_ranks(server, tiny_model, tmp_path):
    cores = sorted(os.sched_getaffinity(0))
    extra = {"path": str(tmp_path / "disk"), "capacity_gb": 0.1, "prefetch_threshold": 16}
    flags = (
        *("--tp-size", "2", "--page-size", "16", "--radix-eviction", "wa", "--enable-metrics"),
        *("--enable-hierarchical-cache", "--hicache-ratio", "1.5"),
        *("--hicache-storage-backend", "canopy"),
        *("--hicache-storage-prefetch-policy", "wait_complete"),
        *("--hicache-storage-backend-extra-config", json.dumps(extra)),
    )
    environment = {"SGLANG_CPU_OMP_THREADS_BIND": f"{cores[0]}|{cores[-1]}"}
    draw = random.Random(2)
    prompts = [[draw.randrange(1000, 9000) for _ in range(300)] for _ in range(6)]
    with server(tiny_model, *flags, kv_tokens=1024, environment=environment) as client:
        sent = 0
        for _ in range(3):
            for prompt in prompts:
                client.generate(prompt, 2)
                sent += len(prompt)
        client.post("/hicache/storage-backend/clear")
        client.flush()
        client.generate(prompts[0], 2)
        rank = counted(client, sent + len(prompts[0]))
        found = tokens_of(rank)
        assert sum(found.values()) == missed_by(rank)
        assert found["never_seen", "none"] >= 6 * 288
        assert rank["missed"]["corrected_tokens"] == 0
        (peer,) = rank["peers"]
        assert "other_namespace" not in json.dumps(peer)
        assert "Traceback" not in client.server.log_text()


@pytest.mark.long
def test_only_the_administrator_learns_that_another_tenant_had_the_prompt(server, tiny_model):
    flags = ("--radix-eviction", "wa", "--enable-metrics", "--admin-api-key", ADMIN)
    draw = random.Random(3)
    prompt = [draw.randrange(1000, 9000) for _ in range(400)]
    with server(tiny_model, *flags, kv_tokens=2048) as client:
        client.generate(prompt, 2, cache_salt="first tenant")
        client.generate(prompt, 2, cache_salt="second tenant")
        rank = counted(client, 800)
        assert tokens_of(rank)["never_seen", "none"] >= 2 * 398
        assert sum(tokens_of(rank).values()) == missed_by(rank)
        assert "other_namespace" not in json.dumps(rank)
        assert "other_namespace" not in client.get("/metrics")
        for key, shown in ((ADMIN, True), ("a guess", False)):
            headers = {"Authorization": f"Bearer {key}"}
            request = urllib.request.Request(client.url + "/canopy/status", headers=headers)
            with urllib.request.urlopen(request, timeout=60) as answer:
                (seen,) = json.loads(answer.read())["ranks"]
            assert ("other_namespace" in seen["missed"]) is shown
            if shown:
                assert 380 <= seen["missed"]["other_namespace"] <= 400
