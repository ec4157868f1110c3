"""Tenants and trust on real servers: replicas with an administrator's key, and workers behind gateways."""

import contextlib
import json
from typing import Any

import pytest

from sglang_canopy.request.client_hints import GATEWAY_HEADER, SECRET_VARIABLE
from sglang_canopy.request.sent import METADATA
from support.gateways import MODULES, post, running, skip_without
from support.prompts import token_ids
from support.served import until

pytestmark = pytest.mark.long
ADMIN, SECRET = "the-administrators-key", "0123456789abcdef-of-the-gateway"
BEARER = {"Authorization": f"Bearer {ADMIN}"}
GATEWAY = {GATEWAY_HEADER: SECRET}


def fill(client: Any, rank: int, seed: int) -> tuple[list[int], list[int]]:
    """Fill a replica with two conversations; the older is evicted first. Its client's hint that it is over
    is ignored, since users of this server may not give that hint."""
    old, ended = token_ids(500, seed), token_ids(500, seed + 1)
    for name, prompt in (("old", old), ("ended", ended)):
        said = {"canopy_conversation": name, "canopy_over": name == "old"}
        client.generate(prompt, custom_params=said, routed_dp_rank=rank, cache_salt="a")
    return old, ended


def test_a_hint_reaches_every_replica_and_only_trusted_ones_count(server, tiny_model) -> None:
    flags = ("--radix-eviction", "wa", "--dp-size", "2")
    flags += ("--admin-api-key", ADMIN, "--canopy-client-hints", "trusted")
    environment = {SECRET_VARIABLE: SECRET, "SGLANG_CPU_OMP_THREADS_BIND": "0|0"}
    with server(tiny_model, *flags, kv_tokens=2048, environment=environment) as client:
        nobody_reads_that_another_tenant_had_the_prompt(client)
        assert client.send("/flush_cache?timeout=20", {}, **BEARER)[0] == 200
        filled = [fill(client, rank, 10 * rank) for rank in range(2)]
        hint = {"conversation": "ended", "over": True, "cache_salt": "a"}
        wrong = {**hint, "conversation": "old"}
        assert client.send("/canopy/hint", wrong)[0] == 401
        assert client.send("/canopy/hint", wrong, **{GATEWAY_HEADER: "a guess"})[0] == 401
        assert client.send("/canopy/hint", hint, **GATEWAY)[0] == 200
        forged = {"server_args": {"canopy_hints:[]": 1}}
        assert client.send("/set_internal_state", forged, **BEARER)[0] == 403
        # This request is refused after it was stamped. Its hints must not be lost.
        too_long = {"input_ids": token_ids(9000, 7), "sampling_params": {}}
        assert client.send("/generate", too_long)[0] == 400
        for rank, (old, ended) in enumerate(filled):
            client.generate(token_ids(1400, 50 + rank), routed_dp_rank=rank)
            assert client.cached(old, routed_dp_rank=rank, cache_salt="a")["total"] > 400
            assert client.cached(ended, routed_dp_rank=rank, cache_salt="a")["total"] < 250
        log = client.server.log_text()
        assert SECRET not in log
        assert "Traceback" not in log
        answers_are_equal_on_both_replicas(client)


def nobody_reads_that_another_tenant_had_the_prompt(client: Any) -> None:
    prompt = token_ids(400, 3)
    for tenant in ("first", "second"):
        client.generate(prompt, 2, cache_salt=tenant, routed_dp_rank=0)

    def missed(**headers: str) -> Any:
        rank = json.loads(client.send("/canopy/status", **headers)[1])["ranks"][0]
        return rank["prompt_tokens"] >= 800 and rank["missed"]

    for headers in ({}, BEARER):
        found = until(lambda sent=headers: missed(**sent))
        assert found["tokens"]["never_seen"]["none"] >= 2 * 398
        shown = client.send("/canopy/status", **headers)[1] + client.send("/metrics", **headers)[1]
        assert "namespace" not in str(shown)


def answers_are_equal_on_both_replicas(client: Any) -> None:
    prompt, said = token_ids(300, 4), set()
    for rank in (0, 1, 0, 1):
        answer = client.generate(prompt, 8, routed_dp_rank=rank, cache_salt="both")
        said.add(str(answer["output_ids"]))
    assert answer["meta_info"]["cached_tokens"] == 299
    assert len(said) == 1


LONG = "The ants go marching one by one. " * 60


def chat(url: str, opening: str, salt: str | None = None, **more: Any) -> int:
    """Send a turn of the conversation ``OPENING-c``; return its cached prompt tokens."""
    messages = [{"role": "user", "content": f"{opening}. {LONG}"}]
    body = {"model": "tiny", "messages": messages, "max_tokens": 4, "temperature": 0, **more}
    if salt is not None:
        body["metadata"] = {METADATA["cache_salt"]: salt, "user_id": f"u_session_{opening}-c"}
    status, answer = post(f"{url}/v1/chat/completions", body)
    assert status == 200, answer
    return (answer["usage"]["prompt_tokens_details"] or {}).get("cached_tokens", 0)


def message(url: str, opening: str, salt: str) -> int:
    """Send a turn on ``/v1/messages``; return its cached prompt tokens."""
    system = [{"type": "text", "text": opening}, {"type": "text", "text": LONG}]
    body = {"model": "tiny", "system": system, "max_tokens": 4, "cache_salt": salt}
    body["messages"] = [{"role": "user", "content": "Go on."}]
    status, answer = post(f"{url}/v1/messages", body)
    assert status == 200, answer
    return answer["usage"].get("cache_read_input_tokens", 0)


def said_to_be(client: Any, conversation: str, salt: str) -> str | None:
    """Return the hint that a worker's policy received about a conversation: ``over`` or ``None``."""
    path, tenant = f"/canopy/explain?conversation={conversation}", {"X-Canopy-Cache-Salt": salt}
    # Users get an explanation every half a second.
    text = until(lambda: (found := client.send(path, **tenant))[0] == 200 and found[1])
    (found,) = json.loads(text)["replicas"][0]
    return found["belief"].get("hinted")


def test_tenants_stay_apart_behind_gateways_and_hints_reach_both_workers(
    server, tiny_model, tmp_path
) -> None:
    for gateway in MODULES:
        skip_without(gateway)
    flags = ("--radix-eviction", "wa", "--canopy-carriers", "metadata", "--enable-cache-report")
    flags += ("--served-model-name", "tiny")
    with contextlib.ExitStack() as stack:
        workers = [
            stack.enter_context(server(tiny_model, *flags, kv_tokens=16_384)) for _ in range(2)
        ]
        urls = [worker.url for worker in workers]
        for gateway in MODULES:
            url = stack.enter_context(running(gateway, urls, tmp_path / f"{gateway}.log"))
            talk = f"{gateway}-c"
            for salt in ("a", "b"):
                # Round robin: the first two requests meet both workers.
                first = [chat(url, gateway, salt) for _ in urls]
                again = [chat(url, gateway, salt) for _ in urls]
                assert max(first) < 100, "another tenant's KV"
                assert min(again) > 300
            for worker in workers:
                worker.post("/canopy/hint", {"conversation": talk, "over": True, "cache_salt": "a"})
                until(lambda one=worker, talk=talk: said_to_be(one, talk, "a") == "over")
                assert said_to_be(worker, talk, "b") is None
        # The last gateway is smg, which has this route.
        for salt in ("a", "b"):
            assert max(message(url, "Messages", salt) for _ in urls) < 100
            assert min(message(url, "Messages", salt) for _ in urls) > 300
        # sglang-router drops the salt in the body: the worker logs that once.
        router = stack.enter_context(running("sglang-router", urls, tmp_path / "router.log"))
        for _ in range(4):
            chat(router, "Dropped", cache_salt="d")
        for worker in workers:
            assert worker.server.log_text().count("names no tenant") == 1
