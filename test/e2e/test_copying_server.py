"""Copies ahead of eviction in real servers: same answers, more hits from a host of the same size."""

from __future__ import annotations

import json

import pytest

TOKENS = 2048
CONVERSATIONS, ROUNDS, OUTPUT = 10, 3, 4
HOST = ("--enable-hierarchical-cache", "--hicache-ratio", "1.01")


def prompts() -> list[list[int]]:
    """Ten conversations in turn, each a little longer than in the round before.

    Together they fill one and a half devices, so that a host of its size holds the rest, unless
    it holds what the device holds.
    """
    asked = []
    for turn in range(ROUNDS):
        for one in range(CONVERSATIONS):
            length = 280 + 20 * turn
            asked.append([1000 + (one * 977 + 31 * i) % 20000 for i in range(length)])
    return asked


def replay(client) -> tuple[list, int, dict | None]:
    said, hits = [], 0
    for prompt in prompts():
        answer = client.generate(prompt, OUTPUT)
        said.append(answer["output_ids"])
        hits += answer["meta_info"]["cached_tokens"]
    ranks = json.loads(client.get("/canopy/status"))["ranks"]  # none without a policy of ours
    return said, hits, ranks[0] if ranks else None


@pytest.mark.long
@pytest.mark.parametrize("policy", ["canopy-lru", "wa"])
def test_the_same_answers_with_more_hits_and_without_a_wait(server, smollm2, policy) -> None:
    ours = ("--radix-eviction", policy, "--enable-metrics", *HOST)
    ahead = ("--hicache-write-policy", "write_back", "--canopy-copy-ahead", "auto")
    with server(smollm2, *ours, *ahead, kv_tokens=TOKENS) as copying:
        said, hits_ahead, status = replay(copying)
        metrics = copying.get("/metrics")
    copies = status["copy_ahead"]
    print(policy, "copy ahead:", hits_ahead, copies, flush=True)
    assert copies["used"] > 0
    # The window begins with 1/64 of the device, 32 tokens, and a prompt evicts 300: the first
    # evictions wait, until their rate is known.
    assert copies["stalls"] <= 10
    assert "canopy:copy_ahead_tokens_total" in metrics
    assert "canopy:copy_ahead_window_tokens" in metrics
    with server(smollm2, kv_tokens=TOKENS) as plain:
        expected, hits_plain, _ = replay(plain)
    print(policy, "SGLang without a host:", hits_plain, said == expected, flush=True)
    assert said == expected
    with server(smollm2, *ours, kv_tokens=TOKENS) as through:
        said, hits_through, _ = replay(through)
    print(policy, "write_through:", hits_through, flush=True)
    assert said == expected
    assert hits_ahead > 1.5 * hits_through
