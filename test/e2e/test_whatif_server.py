"""The what-if meter on real servers: under SGLang's own policy, and under one of Canopy's."""

import json
import random
import re
import shutil
import subprocess
import time
import urllib.error
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


def page_of(browser: str, url: str, folder: Any) -> str:
    """The page's elements as a browser has them once they are filled; and a picture of it."""
    flags = ("--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=6000")
    what = ("--dump-dom", "--hide-scrollbars", f"--screenshot={folder}/page.png")
    size = ("--window-size=1280,1700", f"--user-data-dir={folder}/browser")
    done = subprocess.run(
        [browser, *flags, *what, *size, url],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    return done.stdout


@pytest.mark.long
def test_policies_are_exchanged_under_load_and_every_answer_is_the_same(
    server, tiny_model, tmp_path
):
    """Three clients at once, on two tiers that are too small; first without an exchange."""
    asked = conversations(90, seed=2)
    flags = ("--page-size", "16", "--enable-hierarchical-cache", "--hicache-ratio", "2")
    changes: list[dict[str, Any]] = [
        {"device": "canopy-lru"},
        {"device": "wa", "host": "canopy-lru"},
        {"device": "threshold-lru"},
        {"device": "wa"},
    ]
    answers = []
    for exchanged in (False, True):
        with server(
            tiny_model,
            *flags,
            *("--radix-eviction", "wa", "--canopy-whatif", "auto,floor=off"),
            kv_tokens=2048,
        ) as client:

            def ask(one: tuple[list[int], dict[str, Any]], client: Any = client) -> str:
                return client.generate(one[0], 4, custom_params=one[1])["text"]

            with ThreadPoolExecutor(3) as pool:
                asking = [pool.submit(ask, one) for one in asked]
                for number, change in enumerate(changes if exchanged else ()):
                    asking[(number + 1) * 15].result()
                    before = json.loads(client.get("/canopy/status"))["ranks"][0]["nodes"]
                    assert client.post("/canopy/policy", change)["replicas"] == 1
                    assert before > 0
                answers.append([one.result() for one in asking])
            status = sampled(client, len(asked))
            (rank,) = status["ranks"]
            assert [one["after"].split()[0] for one in rank["policy_changes"]] == (
                ["canopy-lru", "wa", "threshold-lru", "wa"] if exchanged else []
            )
            assert status["policy"] == rank["running"] == "wa"
            assert sum(rank["tiers"]["device"]["evicted_tokens"].values()) > 0
            arms = {(a["policy"], a["capacity"]) for a in status["whatif"]["arms"]}
            assert ("wa", "host x2") in arms
            assert status["whatif"]["spent_s"] > 0
            told = json.loads(client.get("/canopy/explain?conversation=c1"))
            (one,) = told["replicas"][0]
            assert one["cached"]
            assert one["nodes"][-1]["offset"] >= 0
            assert one["evicted"]
            if exchanged and (browser := shutil.which("chromium")):
                shown = page_of(browser, client.url + "/canopy/ui", tmp_path)
                assert "policy wa" in shown
                assert "no news" not in shown
                drawn = shown.count('class="u-wrap"')
                assert drawn >= 1
                assert drawn + shown.count("a chart from the next minute on") >= 4
            with pytest.raises(urllib.error.HTTPError) as refused:
                client.post("/canopy/policy", {"device": "lru"})
            assert refused.value.code == 400
            assert "Traceback" not in client.server.log_text()
    assert answers[0] == answers[1]
