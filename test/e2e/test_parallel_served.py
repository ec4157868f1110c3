"""Ranks, replicas and pipeline stages: the text is that of SGLang's own policy in the same set-up."""

from pathlib import Path
from typing import Any

import pytest

from support.prompts import token_ids
from support.small_models import LLAMA, write_model

HEADS = [token_ids(300, seed) for seed in range(1, 6)]
CORES = {"SGLANG_CPU_OMP_THREADS_BIND": "0|1"}
KV_TOKENS = 1024
"""For three of five beginnings."""


def said(client: Any) -> tuple[list[Any], int]:
    answers = []
    for number in range(15):
        head = HEADS[number % 5] if number < 10 else HEADS[number % 2]
        answers.append(client.generate(head + token_ids(12, 60 + number), 6))
    found = sum(answer["meta_info"]["cached_tokens"] for answer in answers)
    return [answer["output_ids"] for answer in answers], found


@pytest.mark.long
@pytest.mark.parametrize("size", ["--tp-size", "--dp-size", "--pp-size"])
def test_answers_are_those_of_sglangs_policy(size, server, smollm2, tmp_path: Path) -> None:
    # The last of SGLang's stages lacks the embeddings, and so the head that is tied to them.
    model = write_model(tmp_path / "model", smollm2, LLAMA, tie_word_embeddings=False)
    answers, found = {}, {}
    for policy in ("lru", "wa"):
        arguments = (size, "2", "--radix-eviction", policy)
        options = {"environment": CORES, "kv_tokens": KV_TOKENS}
        with server(model, *arguments, **options) as client:
            answers[policy], found[policy] = said(client)
            assert "Traceback" not in client.server.log_text()
    print(f"cached tokens: {found}")
    assert len({str(answer) for answer in answers["lru"]}) > len(HEADS), "prompts change nothing"
    assert answers["wa"] == answers["lru"]
    assert found["wa"] > 0
