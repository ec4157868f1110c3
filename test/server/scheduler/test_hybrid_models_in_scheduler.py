"""Hybrid models in SGLang's own scheduler: the text is transformers', cached, evicted and batched."""

import pytest

from support.hybrid_models import ANSWER, agrees, build, by_turn, conversations, greedy
from support.worker import worked

PATIENCE_S = 900
SLOTS = ("--max-mamba-cache-size", "12", "--max-running-requests", "3")
HOST = ("--enable-hierarchical-cache", "--hicache-ratio", "6")
OURS = ("wa", "host")
RUNS = {
    ("windows", "wa"): ("--radix-eviction", "wa"),
    ("windows", "host"): ("--radix-eviction", "wa", *HOST),
    ("windows", "lru"): ("--radix-eviction-policy", "lru"),
    ("states", "wa"): ("--radix-eviction", "wa", *SLOTS),
    ("states", "host"): ("--radix-eviction", "wa", *SLOTS, *HOST),
    ("states", "lru"): ("--radix-eviction-policy", "lru", *SLOTS),
}
KINDS_OF = {"windows": ["FULL", "SWA"], "states": ["FULL", "MAMBA"]}


@pytest.mark.long
@pytest.mark.timeout(2 * PATIENCE_S)
@pytest.mark.parametrize("kind", KINDS_OF)
def test_answers_are_transformers_with_sglangs_policy_and_with_ours(kind, smollm2, tmp_path):
    model = build(kind, tmp_path / kind, smollm2)
    together = [greedy(model, prompt, ANSWER) for prompt in conversations()]
    expected = together + [together[conversations().index(prompt)] for prompt in by_turn()]
    cached, from_host = {}, {}
    for policy in (*OURS, "lru"):
        run = RUNS[kind, policy]
        found = worked("hybrid_worker", tmp_path / kind, "700", *run, patience_s=PATIENCE_S)
        assert found["components"] == KINDS_OF[kind]
        assert (found["core"] == "CanopyTreeCore") == (policy in OURS)
        assert agrees(found["answers"], expected), policy
        assert agrees(found["together"], together), policy
        cached[policy], from_host[policy] = sum(found["cached"]), sum(found["host"])
    assert cached["host"] > cached["wa"] > 0
    assert from_host["host"] > 0 == from_host["wa"]
    assert cached["wa"] >= 0.9 * cached["lru"], cached
