"""Real servers with ``--canopy-session-gate``: a new session waits."""

import http.client
import json
import threading
import time
import urllib.request
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from support.prompts import token_ids

GATED = ("--radix-eviction", "canopy-lru", "--canopy-session-gate")
KV_TOKENS = 2048
PROMPT = 900
WAIT_S = 120.0


AGENT = {"canopy_category": "agent", "canopy_stop": "tool"}


def turn(client: Any, name: str, prompt: list[int], tokens: int = 4, **body: Any) -> dict[str, Any]:
    return client.generate(prompt, tokens, {**AGENT, "canopy_conversation": name}, **body)


def gate_status(client: Any) -> dict[str, Any]:
    return json.loads(client.get("/canopy/status"))["ranks"][0]["session_gate"]


def until(client: Any, reached: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    """The gate's status once it is as it should be: it is shown once a second."""
    end = time.monotonic() + WAIT_S
    while time.monotonic() < end:
        status = gate_status(client)
        if reached(status):
            return status
        time.sleep(0.2)
    raise AssertionError(f"the gate never came to this: {gate_status(client)}")


def post(client: Any, path: str, body: dict[str, Any]) -> http.client.HTTPResponse:
    """Return an answer with any status."""
    host = client.url.removeprefix("http://")
    connection = http.client.HTTPConnection(host, timeout=WAIT_S)
    connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
    return connection.getresponse()


def in_thread(call: Callable[..., Any], *arguments: Any) -> Future[Any]:
    pool = ThreadPoolExecutor(1)
    future = pool.submit(call, *arguments)
    pool.shutdown(wait=False)
    return future


def fill(client: Any) -> str:
    """Three agents evict each other until the gate arms, and leave; then two take all memory. Returns the
    answer of session ``c`` alone, taken before."""
    alone = turn(client, "alone", token_ids(PROMPT, 2))["text"]
    client.post("/canopy/hint", {"conversation": "alone", "over": True})
    client.flush()
    armed = threading.Event()

    def agent(number: int) -> None:
        while not armed.is_set():
            turn(client, f"thrashing {number}", token_ids(PROMPT, 10 + number))

    with ThreadPoolExecutor(3) as pool:
        agents = [pool.submit(agent, number) for number in range(3)]
        until(client, lambda gate: gate["active"] and gate["pauses"])
        armed.set()
        while not all(one.done() for one in agents):
            for number in range(3):
                over = {"conversation": f"thrashing {number}", "over": True}
                client.post("/canopy/hint", over)
            time.sleep(0.1)
        for one in agents:
            one.result()
    for seed, name in enumerate("ab"):
        turn(client, name, token_ids(PROMPT, seed))
    return alone


@pytest.mark.long
def test_a_new_session_waits_for_room_and_its_answer_is_unchanged(server, smollm2: Path):
    with server(smollm2, *GATED, "auto", "--enable-metrics", kv_tokens=KV_TOKENS) as client:
        alone = fill(client)
        third = in_thread(turn, client, "c", token_ids(PROMPT, 2))
        until(client, lambda gate: gate["waiting_sessions"] == 1)
        longer = token_ids(PROMPT, 0) + token_ids(9, 20)
        assert turn(client, "a", longer)["meta_info"]["cached_tokens"] >= PROMPT
        time.sleep(2.0)
        until(client, lambda gate: gate["clock_ago_s"] < 3.0)  # ticks arrive without requests
        assert not third.done()
        with urllib.request.urlopen(client.url + "/health", timeout=WAIT_S) as answer:
            assert answer.status == 200
        client.post("/canopy/hint", {"conversation": "b", "over": True})
        assert third.result(timeout=WAIT_S)["text"] == alone
        status = until(client, lambda gate: gate["delayed_sessions"] == 1)
        assert status["waiting_sessions"] == 0
        assert "canopy:gate_delayed_sessions_total" in client.get("/metrics")

        # Requests aborted while they wait leave no state behind.
        for rid in ("gone", ""):
            sampling = {
                "max_new_tokens": 4,
                "custom_params": {**AGENT, "canopy_conversation": f"d{rid}"},
            }
            body = {"input_ids": token_ids(PROMPT, 3), "sampling_params": sampling}
            waiting = in_thread(post, client, "/generate", body | ({"rid": rid} if rid else {}))
            until(client, lambda gate: gate["waiting_sessions"] == 1)
            client.post("/abort_request", {"rid": rid, "abort_all": not rid})
            waiting.result(timeout=WAIT_S)
            until(client, lambda gate: gate["waiting_sessions"] == 0)
        assert gate_status(client)["footprint_tokens"] < 3 * PROMPT
        assert "Traceback" not in client.server.log_text()
