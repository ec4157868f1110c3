"""Real servers with two data-parallel replicas and an admin key: trusted hints and their receivers."""

import json
import urllib.error
import urllib.request
from typing import Any

import pytest

from sglang_canopy.request.client_hints import GATEWAY_HEADER, SECRET_VARIABLE
from support.prompts import token_ids

ADMIN = "the-administrators-key"
SECRET = "0123456789abcdef-of-the-gateway"
BEARER = {"Authorization": f"Bearer {ADMIN}"}
GATEWAY = {GATEWAY_HEADER: SECRET}


def call(client, path: str, body: Any = None, headers: dict[str, str] | None = None) -> int:
    data = None if body is None else json.dumps(body).encode()
    given = {"Content-Type": "application/json", **(headers or {})}
    try:
        request = urllib.request.Request(client.url + path, data, given)
        with urllib.request.urlopen(request, timeout=120) as answer:
            return answer.status
    except urllib.error.HTTPError as error:
        return error.code


def fill(client, rank: int, seed: int) -> tuple[list[int], list[int]]:
    """Fill a replica with two conversations; the older is evicted first. Its client's hint that it is over
    is ignored, since users of this server may not give that hint."""
    old, ended = token_ids(500, seed), token_ids(500, seed + 1)
    for name, prompt in (("old", old), ("ended", ended)):
        said = {"canopy_conversation": name, "canopy_over": name == "old"}
        client.generate(prompt, custom_params=said, routed_dp_rank=rank, cache_salt="a")
    return old, ended


@pytest.mark.long
def test_a_hint_reaches_every_replica_and_only_trusted_ones_count(server, tiny_model):
    arguments = ("--radix-eviction", "wa", "--dp-size", "2")
    arguments += ("--admin-api-key", ADMIN, "--canopy-client-hints", "trusted")
    environment = {SECRET_VARIABLE: SECRET, "SGLANG_CPU_OMP_THREADS_BIND": "0|0"}
    with server(tiny_model, *arguments, kv_tokens=2048, environment=environment) as client:
        filled = [fill(client, rank, 10 * rank) for rank in range(2)]
        hint = {"conversation": "ended", "over": True, "cache_salt": "a"}
        wrong = {**hint, "conversation": "old"}
        assert call(client, "/canopy/hint", wrong) == 401
        assert call(client, "/canopy/hint", wrong, {GATEWAY_HEADER: "a guess"}) == 401
        assert call(client, "/canopy/hint", hint, GATEWAY) == 200
        forged = {"server_args": {"canopy_hints:[]": 1}}
        assert call(client, "/set_internal_state", forged, BEARER) == 403
        # This request is refused after it was stamped. Its hints must not be lost.
        too_long = {"input_ids": token_ids(9000, 7), "sampling_params": {}}
        assert call(client, "/generate", too_long) == 400
        for rank, (old, ended) in enumerate(filled):
            client.generate(token_ids(1400, 50 + rank), routed_dp_rank=rank)
            assert client.cached(old, routed_dp_rank=rank, cache_salt="a")["total"] > 400
            assert client.cached(ended, routed_dp_rank=rank, cache_salt="a")["total"] < 250
        assert call(client, "/canopy/status") == 200
        assert call(client, "/canopy/status", headers=BEARER) == 200
        log = client.server.log_text()
        assert SECRET not in log
        assert "Traceback" not in log
