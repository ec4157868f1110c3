"""`--canopy-ttft-slo-s` on one rank and two: every route answers 429, streams included, and ranks agree."""

import json
import os
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from sglang_canopy.schedule.prefill_cost import PRIOR
from support.prompts import token_ids

LIMIT_S = 0.02
LONG = "Which leaf goes first? " * 150
"""More tokens than a limit of ``LIMIT_S`` allows before the first fit."""
ROUTES: dict[str, tuple[str, dict[str, Any]]] = {
    "/generate": ("text", {"sampling_params": {"max_new_tokens": 2}}),
    "/v1/completions": ("prompt", {"model": "m", "max_tokens": 2}),
    "/v1/chat/completions": ("messages", {"model": "m", "max_tokens": 2}),
    "/v1/responses": ("input", {"model": "m", "max_output_tokens": 2}),
    "/v1/messages": ("messages", {"model": "m", "max_tokens": 2}),
    "/api/chat": ("messages", {"model": "m", "options": {"num_predict": 2}}),
    "/api/generate": ("prompt", {"model": "m", "options": {"num_predict": 2}}),
}


def body(path: str, text: str, **more: Any) -> dict[str, Any]:
    field, rest = ROUTES[path]
    prompt: Any = [{"role": "user", "content": text}] if field == "messages" else text
    return {field: prompt, **rest, **more}


def call(client: Any, path: str, asked: dict[str, Any]) -> tuple[int, str | None, str]:
    raw = json.dumps(asked).encode()
    request = urllib.request.Request(client.url + path, raw, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=120) as answer:
            return answer.status, None, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.headers.get("Retry-After"), error.read().decode()


def status(client: Any) -> dict[str, Any]:
    return json.loads(client.get("/canopy/status"))


@pytest.mark.long
@pytest.mark.parametrize("ranks", [1, 2])
def test_each_route_refuses_with_429_and_ranks_agree(server, tiny_model, ranks) -> None:
    assert len(LONG.split()) * PRIOR[1] > LIMIT_S
    flags = ("--radix-eviction", "wa", "--canopy-queue-order", "bounded-shortest")
    flags += ("--tp-size", str(ranks))
    limit = ("--canopy-ttft-slo-s", str(LIMIT_S), "--served-model-name", "m", "--enable-metrics")
    cores = sorted(os.sched_getaffinity(0))
    environment = {"SGLANG_CPU_OMP_THREADS_BIND": f"{cores[0]}|{cores[-1]}"} if ranks > 1 else {}
    refused = 0
    with server(
        tiny_model, *flags, *limit, kv_tokens=8192, ready_s=1000.0, environment=environment
    ) as client:
        for path in ROUTES:
            for stream in (False, True):
                code, wait, text = call(client, path, body(path, LONG, stream=stream))
                assert (code, wait) == (429, "1"), (path, stream, text)
                assert "limit of 0.02 s" in text, (path, stream, text)
                refused += 1
        for path in ("/v1/completions", "/v1/chat/completions"):
            for stream in (False, True):
                code, wait, text = call(client, path, body(path, LONG, n=4, stream=stream))
                assert (code, wait) == (429, "1"), (path, stream, text)
                refused += 1
        for path in ROUTES:
            for stream in (False, True):
                code, _, text = call(client, path, body(path, "Which?", stream=stream))
                assert code == 200, (path, stream, text)
        # Costs are fitted, and their factors agreed, while many requests wait.
        with ThreadPoolExecutor(16) as pool:
            asked = [
                {"input_ids": token_ids(20 + 5 * n, n), "sampling_params": {"max_new_tokens": 2}}
                for n in range(80)
            ]
            codes = [one[0] for one in pool.map(lambda one: call(client, "/generate", one), asked)]
        assert set(codes) <= {200, 429}
        refused += codes.count(429)
        deadline = time.monotonic() + 60
        while True:
            found = status(client)
            (rank,) = found["ranks"]
            mine = rank["agreement"]
            others = [{key: peer[key] for key in mine} for peer in rank["peers"]]
            counted = found["refused_requests"]["ttft_slo"]
            if (others, counted) == ([mine] * (ranks - 1), refused):
                break
            assert time.monotonic() < deadline, (mine, others, counted, refused)
            time.sleep(0.3)
        assert rank["queue"]["ttft_slo"]["exceeded"] == refused
        metrics = client.get("/metrics")
    assert "canopy:ttft_slo_exceeded_total" in metrics
