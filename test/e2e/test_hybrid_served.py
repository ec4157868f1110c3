"""Serve models with sliding windows or recurrent states over HTTP: answers equal those under SGLang's policy."""

import json
from typing import Any

import pytest

from support.hybrid_models import ANSWER, build, by_turn, conversations
from support.small_models import VOCABULARY

KV_TOKENS = 700
"""A third of the prompts' tokens."""
SLOTS = ("--max-mamba-cache-size", "12", "--max-running-requests", "3")
MORE = {"windows": ((), ()), "states": (SLOTS, ())}
"""Model -> additional flags (for all policies, for Canopy's policies)."""
HOST = ("--enable-hierarchical-cache", "--hicache-ratio", "6")


def said(client: Any) -> tuple[list[list[int]], int, int]:
    """Return the answers to all prompts, sent twice, with their cached tokens in all and on the host."""
    answers = [client.generate(ids, ANSWER) for ids in conversations() + by_turn()]
    meta = [answer["meta_info"] for answer in answers]
    return (
        [answer["output_ids"] for answer in answers],
        sum(one["cached_tokens"] for one in meta),
        sum((one.get("cached_tokens_details") or {}).get("host", 0) for one in meta),
    )


@pytest.mark.long
@pytest.mark.parametrize("kind", MORE)
def test_hybrid_models_answer_as_with_sglangs_policy(kind, server, smollm2, tmp_path) -> None:
    build(kind, tmp_path / kind, smollm2, vocab_size=VOCABULARY)
    always, ours = MORE[kind]
    arms = {"lru": ("lru",), "wa": ("wa", *ours), "host": ("wa", *ours, *HOST)}
    answers, found, from_host, ranks = {}, {}, {}, {}
    for arm, more in arms.items():
        arguments = ("--radix-eviction", *more, *always)
        with server(tmp_path / kind, *arguments, kv_tokens=KV_TOKENS) as client:
            answers[arm], found[arm], from_host[arm] = said(client)
            if arm != "lru":
                (ranks[arm],) = json.loads(client.get("/canopy/status"))["ranks"]
            assert "Traceback" not in client.server.log_text()
    assert len({json.dumps(answer) for answer in answers["lru"]}) > 6, "prompts change nothing"
    print(f"cached tokens: {found}, of those from the host: {from_host}")
    assert answers["wa"] == answers["lru"]
    assert answers["host"] == answers["lru"]
    assert all(rank["tiers"]["device"]["evicted_tokens"]["capacity"] > 0 for rank in ranks.values())
    assert found["wa"] >= 0.9 * found["lru"] > 0
    assert found["host"] > found["wa"]
    assert from_host["host"] > 0
