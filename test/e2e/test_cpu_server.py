"""SGLang on a CPU with Canopy: text, batches and measured times; with `--all` under its own policy too."""

import pytest

from canopy_lab.cli.main import main
from canopy_lab.sim.system import SystemConfig, load_profile, simulate_system
from canopy_lab.trace.record import TraceRequest
from support.prompts import token_ids

LRU = ("--radix-eviction-policy", "lru")
pytestmark = pytest.mark.xdist_group("canopy")


@pytest.mark.parametrize("which", ["small_model", pytest.param("smollm2", marks=pytest.mark.long)])
def test_greedy_text_with_a_cache_is_transformers(shared_server, which, request):
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    path = request.getfixturevalue(which)
    tokenizer = AutoTokenizer.from_pretrained(str(path))
    model = AutoModelForCausalLM.from_pretrained(str(path), dtype=torch.float32)
    story = "Once upon a time there was a small lighthouse on a rock in the sea. " * 8
    prompts = [tokenizer(story + end)["input_ids"] for end in ("Its keeper", "At night", "One day")]
    prompts += [prompts[0] + tokenizer(" was old. He")["input_ids"], prompts[1]]
    if which == "small_model":
        client = request.getfixturevalue("canopy_server")
    else:
        client = shared_server(path, *LRU, kv_tokens=2048)
    answers = [client.generate(p, 16) for p in prompts]
    assert [a["meta_info"]["cached_tokens"] > 100 for a in answers] == [False] + [True] * 4
    for prompt, answer in zip(prompts, answers):
        made = model.generate(
            torch.tensor([prompt]), do_sample=False, min_new_tokens=16, max_new_tokens=16
        )
        assert made[0, len(prompt) :].tolist() == answer["output_ids"]


@pytest.mark.long
def test_the_pool_evicts_and_a_prefix_is_found_again(shared_server, small_model):
    client = shared_server(small_model, *LRU, kv_tokens=2048)
    prompt = token_ids(600, seed=1)
    assert client.cached(prompt)["total"] == 0
    assert client.cached(prompt + token_ids(20, seed=2))["total"] == 600
    for seed in range(3, 8):
        client.generate(token_ids(600, seed))
    assert client.cached(prompt)["total"] == 0


def test_a_mixed_batch_is_served_together(canopy_server):
    client = canopy_server
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


@pytest.mark.long
def test_the_host_and_a_restarted_servers_disk_give_prefixes_back(server, tiny_model, tmp_path):
    flags = ("--enable-hierarchical-cache", "--hicache-ratio", "4", "--page-size", "16")
    flags += ("--hicache-storage-backend", "file")
    flags += ("--hicache-storage-prefetch-policy", "wait_complete")
    environment = {"SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR": str(tmp_path / "pages")}
    prompt = token_ids(640, seed=1)
    with server(tiny_model, *LRU, *flags, kv_tokens=2048, environment=environment) as client:
        first = client.generate(prompt, 8)["output_ids"]
        for seed in range(2, 7):
            client.generate(token_ids(640, seed))
        again = client.generate(prompt, 8)
    # A page holds the token that is computed last, so it is not counted as cached.
    assert again["meta_info"]["cached_tokens_details"]["host"] >= 640 - 16
    assert again["output_ids"] == first
    with server(tiny_model, *LRU, *flags, kv_tokens=2048, environment=environment) as client:
        restarted = client.generate(prompt, 8)
    assert restarted["meta_info"]["cached_tokens_details"]["storage"] >= 512
    assert restarted["output_ids"] == first


def test_a_measured_profile_simulates(canopy_server, small_model, tmp_path, capsys):
    client = canopy_server
    out = tmp_path / "profile.json"
    limits = [
        "--max-prompt-tokens",
        "256",
        "--max-context-tokens",
        "256",
        "--max-batch",
        "2",
        "--repeats",
        "1",
    ]
    assert main(["profile", "--url", client.url, "--out", str(out), *limits]) == 0
    assert "prefill of" in capsys.readouterr().out
    profile = load_profile(out, model=small_model.name)
    assert profile.source == "measured"
    assert profile.kv_bytes_per_token == 2 * 2 * 2 * 32 * 4  # k and v, layers, heads, size, float32
    assert profile.layers == 1  # on a CPU no copy overlaps compute
    trace = [TraceRequest(0.0, 128, 8, tuple(range(8)), 16)]
    result = simulate_system(trace, SystemConfig(device_tokens=4096), profile)
    assert 0 < result.mean_ttft_s < result.mean_e2e_s
