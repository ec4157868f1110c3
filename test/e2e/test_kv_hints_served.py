"""``kv.release`` of SGLang's ``kv_hints`` on a real server: released KV is evicted first."""

import json
from typing import Any

import pytest

from support.prompts import token_ids

PROMPT = 400
POOL = 1024


def ask(client: Any, prompt: list[int], *kinds: str) -> int:
    """Return the cached tokens of a request with actions of these kinds."""
    body = {"input_ids": prompt, "sampling_params": {"temperature": 0, "max_new_tokens": 4}}
    actions = [
        {"action_id": kind, "action_type": kind, "action_version": "1.0", "payload": {}}
        for kind in kinds
    ]
    if actions:
        body["kv_hints"] = {"protocol_version": "0.1", "message_id": "m", "actions": actions}
    return client.post("/generate", body)["meta_info"]["cached_tokens"]


@pytest.mark.long
def test_released_kv_is_evicted_first_and_other_actions_are_counted(server, smollm2) -> None:
    with server(smollm2, "--radix-eviction", "wa", "--enable-metrics", kv_tokens=POOL) as client:
        first, second, third = (token_ids(PROMPT, seed) for seed in (1, 2, 3))
        ask(client, first)
        ask(client, second)
        ask(client, third)
        assert ask(client, first) < PROMPT - 100
        assert "ignored_fields" not in client.get("/metrics")
        client.flush()
        ask(client, first)
        ask(client, second, "kv.release", "kv.fetch")
        ask(client, third)
        assert ask(client, first) >= PROMPT - 1
        assert json.loads(client.get("/canopy/status"))["ignored_fields"] == {"kv_hints": 1}
        assert 'canopy:ignored_fields_total{dp_rank="0",field="kv_hints"} 1.0' in client.get(
            "/metrics"
        )
