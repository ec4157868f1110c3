"""SGLang on a CPU with Canopy installed and SGLang's own policy: everything must work as ever."""

from __future__ import annotations

import random

import pytest

LRU = ("--radix-eviction-policy", "lru")


def token_ids(count: int, seed: int) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(100, 40_000) for _ in range(count)]


def test_greedy_text_is_the_same_with_and_without_a_cache(server, smollm2):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(smollm2))
    story = "Once upon a time there was a small lighthouse on a rock in the sea. " * 8
    prompts = [tokenizer(story + end)["input_ids"] for end in ("Its keeper", "At night", "One day")]
    prompts += [prompts[0] + tokenizer(" was old. He")["input_ids"], prompts[1]]
    with server(smollm2, *LRU) as client:
        with_cache = [client.generate(p, 16) for p in prompts]
    with server(smollm2, "--disable-radix-cache") as client:
        without = [client.generate(p, 16) for p in prompts]
    assert [a["text"] for a in with_cache] == [a["text"] for a in without]
    assert [a["meta_info"]["cached_tokens"] > 100 for a in with_cache] == [False] + [True] * 4
    assert all(a["meta_info"]["cached_tokens"] == 0 for a in without)


def test_the_pool_evicts_and_a_prefix_is_found_again(shared_server, tiny_model):
    client = shared_server(tiny_model, *LRU, kv_tokens=2048)
    prompt = token_ids(600, seed=1)
    assert client.cached(prompt)["total"] == 0
    assert client.cached(prompt + token_ids(20, seed=2))["total"] == 600
    for seed in range(3, 8):
        client.generate(token_ids(600, seed))
    assert client.cached(prompt)["total"] == 0


def test_a_mixed_batch_is_served_together(shared_server, tiny_model):
    client = shared_server(tiny_model, *LRU, kv_tokens=2048)
    prompts = [token_ids(n, seed=n) for n in (3, 150, 400, 7)]
    alone = [client.generate(p, 8)["output_ids"] for p in prompts]
    client.flush()
    together = client.post(
        "/generate",
        {
            "input_ids": prompts,
            "sampling_params": {"temperature": 0, "max_new_tokens": 8, "ignore_eos": True},
        },
    )
    assert [answer["output_ids"] for answer in together] == alone


def test_what_the_device_evicted_comes_back_from_the_host(server, tiny_model):
    flags = ("--enable-hierarchical-cache", "--hicache-ratio", "4", "--page-size", "16")
    with server(tiny_model, *LRU, *flags, kv_tokens=2048) as client:
        prompt = token_ids(640, seed=1)
        first = client.generate(prompt, 8)["output_ids"]
        for seed in range(2, 7):
            client.generate(token_ids(640, seed))
        again = client.generate(prompt, 8)
    # A page holds the token that is computed last, so it is not counted as cached.
    assert again["meta_info"]["cached_tokens_details"]["host"] >= 640 - 16
    assert again["output_ids"] == first


def test_a_restarted_server_finds_its_prefixes_on_disk(server, tiny_model, tmp_path):
    flags = ("--enable-hierarchical-cache", "--hicache-ratio", "2", "--page-size", "16")
    flags += (
        "--hicache-storage-backend",
        "file",
        "--hicache-storage-prefetch-policy",
        "wait_complete",
    )
    environment = {"SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR": str(tmp_path / "pages")}
    prompt = token_ids(640, seed=1)
    with server(tiny_model, *LRU, *flags, environment=environment) as client:
        first = client.generate(prompt, 8)["output_ids"]
        client.generate(prompt, 1)  # its pages are written after the device-to-host copy
    with server(tiny_model, *LRU, *flags, environment=environment) as client:
        again = client.generate(prompt, 8)
    assert again["meta_info"]["cached_tokens_details"]["storage"] >= 512
    assert again["output_ids"] == first


def test_a_server_that_cannot_start_shows_why(server, tiny_model):
    from sglang_canopy.errors import CanopyError

    with (
        pytest.raises(CanopyError, match=r"before it was ready(.|\n)*no-such-flag"),
        server(tiny_model, "--no-such-flag"),
    ):
        pytest.fail("the server started")
