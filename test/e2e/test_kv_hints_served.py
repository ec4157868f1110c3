"""SGLang's `kv_hints` on a real server: the cache acts on them, and the answer has the outcome."""

import json
from typing import Any

import pytest

from support.prompts import token_ids

PROMPT = 400
POOL = 1024


def ask(client: Any, prompt: list[int], *actions: dict[str, Any]) -> dict[str, Any]:
    body = {"input_ids": prompt, "sampling_params": {"temperature": 0, "max_new_tokens": 4}}
    if actions:
        body["kv_hints"] = {"protocol_version": "0.1", "message_id": "m", "actions": list(actions)}
    return client.post("/generate", body)["meta_info"]


def action(kind: str, **payload: Any) -> dict[str, Any]:
    fields = {"action_id": kind, "action_type": kind, "action_version": "1.0"}
    return {**fields, "payload": payload}


@pytest.mark.long
@pytest.mark.parametrize("released", [False, True])
def test_released_kv_is_evicted_first_and_the_answer_reports_it(server, smollm2, released) -> None:
    flags = ("--radix-eviction", "wa", "--enable-metrics")
    with server(smollm2, *flags, kv_tokens=POOL) as client:
        first, second, third = (token_ids(PROMPT, seed) for seed in (1, 2, 3))
        ask(client, first)
        actions = [action("kv.release"), action("kv.fetch")] if released else []
        outcomes = ask(client, second, *actions).get("kv_hints")
        ask(client, third)
        found = ask(client, first)["cached_tokens"]
        status = json.loads(client.get("/canopy/status"))["kv_hints"]
        metrics = client.get("/metrics")
    if not released:
        assert outcomes is None
        assert found < PROMPT - 100
        assert status == {}
        assert "kv_hints" not in metrics
        return
    assert [one["outcome"] for one in outcomes] == ["accepted", "ignored"]
    assert found >= PROMPT - 1
    assert status == {"other": {"ignored": 1}, "release": {"accepted": 1}}
    counted = {line for line in metrics.splitlines() if line.startswith("canopy:kv_hints_total")}
    assert counted == {
        'canopy:kv_hints_total{action="other",dp_rank="0",outcome="ignored"} 1.0',
        'canopy:kv_hints_total{action="release",dp_rank="0",outcome="accepted"} 1.0',
    }


@pytest.mark.long
def test_hints_of_a_sender_without_trust_are_refused(server, smollm2) -> None:
    flags = ("--radix-eviction", "canopy-lru", "--canopy-client-hints", "trusted")
    secret = {"CANOPY_GATEWAY_SECRET": "a-secret-of-the-gateway"}
    with server(smollm2, *flags, kv_tokens=POOL, environment=secret) as client:
        (one,) = ask(client, token_ids(50, 1), action("kv.retain", seconds=5))["kv_hints"]
    assert (one["outcome"], one["action_id"]) == ("refused", "kv.retain")
