"""Speculative decoding by n-grams in SGLang's own scheduler: the text is that without drafts."""

from pathlib import Path
from typing import Any

import pytest

from support.prompts import token_ids
from support.worker import worked

PATIENCE_S = 900
NGRAM = ("--speculative-algorithm", "NGRAM", "--speculative-num-draft-tokens", "4")
CHAIN = (
    *("--speculative-ngram-min-bfs-breadth", "1", "--speculative-ngram-max-bfs-breadth", "1"),
    *("--page-size", "16"),
)
"""SGLang has wider trees with pages of one token only."""
HOST = ("--enable-hierarchical-cache", "--hicache-ratio", "4", "--max-total-tokens", "600")


def scheduled(model: Path, rounds: list[list[list[int]]], *arguments: str) -> dict[str, Any]:
    return worked("scheduled_answers", model, *arguments, patience_s=PATIENCE_S, given=rounds)


@pytest.mark.long
@pytest.mark.timeout(2 * PATIENCE_S)
@pytest.mark.parametrize("shape", [(), CHAIN], ids=["trees", "chains"])
def test_answers_are_those_without_drafts_on_two_tiers(shape, small_model) -> None:
    heads = [token_ids(160, seed) for seed in (1, 2, 3, 4)]
    rounds = [[head + token_ids(20, 90 + number)] for number in range(3) for head in heads]
    rounds.append([head + token_ids(20, 95) for head in heads])
    alone = scheduled(small_model, rounds, "--radix-eviction-policy", "lru")
    drafted = scheduled(small_model, rounds, "--radix-eviction", "wa", *NGRAM, *shape, *HOST)
    assert drafted["answers"] == alone["answers"]
    device, host, _ = (sum(tier) for tier in zip(*drafted["found"]))
    assert device + host == sum(map(sum, alone["found"]))
    assert host > 0
    assert drafted["victims"] > 0
