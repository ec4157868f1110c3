"""Several tokenizer workers: requests, hints and routes through each of them."""

import json
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from support.prompts import token_ids
from support.small_models import LLAMA, write_model

SLOW_MACHINE = {"SGLANG_UVICORN_WORKER_HEALTHCHECK_TIMEOUT": "120"}
"""A worker whose imports take longer than SGLang's ten seconds is killed and restarted."""
WORKERS = ("--tokenizer-worker-num", "2")
HEADS = [token_ids(200, seed) for seed in (1, 2, 3)]


def asked(client: Any) -> list[Any]:
    """Twenty-four requests on eight connections at a time; each is on one of the workers."""

    def one(number: int) -> Any:
        fields = {"canopy_category": "agent", "canopy_turn": 2, "canopy_conversation": f"c{number}"}
        return client.generate(HEADS[number % 3] + token_ids(9, 50 + number), 6, fields)

    with ThreadPoolExecutor(8) as pool:
        return [answer["output_ids"] for answer in pool.map(one, range(24))]


def workers_of(client: Any) -> list[dict[str, Any]]:
    """Return the status of each worker. The kernel chooses the worker of a connection, and an idle worker
    may take all, so many requests are sent at once until both have answered."""

    def ask(_: int) -> dict[str, Any]:
        return json.loads(client.get("/canopy/status"))

    found: dict[int, dict[str, Any]] = {}
    with ThreadPoolExecutor(32) as pool:
        for _ in range(20):
            found |= {status["process"]: status for status in pool.map(ask, range(64))}
            if len(found) == 2:
                break
    return list(found.values())


def agents(client: Any) -> int:
    """Return the number of requests with fields."""
    (rank,) = json.loads(client.get("/canopy/status"))["ranks"]
    rows = [row for row in rank["categories"] if row["category"].startswith("agent")]
    return sum(row["requests"] for row in rows)


@pytest.mark.long
def test_two_workers_make_equal_stamps_and_accept_hints(server, smollm2, tmp_path) -> None:
    model = write_model(tmp_path / "model", smollm2, LLAMA)
    options = {"environment": SLOW_MACHINE}
    with server(model, *WORKERS, "--radix-eviction", "lru", kv_tokens=4096, **options) as client:
        expected = asked(client)
    with server(model, *WORKERS, "--radix-eviction", "wa", kv_tokens=2048, **options) as client:
        assert asked(client) == expected
        assert len(workers_of(client)) == 2
        deadline = time.monotonic() + 60.0
        while agents(client) < 24:  # the status is written once a second
            assert time.monotonic() < deadline
            time.sleep(0.1)
        for turn in range(4):  # a connection may reach any worker
            old, ended = token_ids(500, 31 + 10 * turn), token_ids(500, 32 + 10 * turn)
            client.flush()
            client.generate(old, custom_params={"canopy_conversation": f"old{turn}"})
            client.generate(ended, custom_params={"canopy_conversation": f"ended{turn}"})
            client.post("/canopy/hint", {"conversation": f"ended{turn}", "over": True})
            time.sleep(2.0)  # the other worker's next request could overtake the hint
            client.generate(token_ids(1400, 33 + 10 * turn))
            assert client.cached(old)["total"] > 400
        # Only at the end: a further request makes its client's hint wrong, and the client loses trust.
        assert client.cached(ended)["total"] < 250
        assert "Traceback" not in client.server.log_text()
