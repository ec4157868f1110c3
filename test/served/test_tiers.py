"""Real servers with device, host and disk: restarts, prompts loaded whole, causes of misses, new weights.

The last test's storage is a Mooncake master and store on loopback (docs/guide/mooncake.md); skipped without.
"""

import json
import os
import shutil
import signal
import time
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from support.mooncake_cluster import PAGE_TOKENS, SEGMENT_BYTES, cluster, mooncake_folder
from support.prompts import token_ids
from support.served import disk_flags, wait_until

__all__ = ["cluster", "mooncake_folder"]
pytestmark = pytest.mark.long
TIER_FLAGS = ("--page-size", "16", "--enable-hierarchical-cache", "--hicache-ratio", "2")
POOL_TOKENS = 1280


def cached_by_tier(answer: dict[str, Any]) -> tuple[int, int, int]:
    """Return the cached tokens on the device, on the host and on the disk."""
    details = answer["meta_info"].get("cached_tokens_details") or {}
    return details.get("device", 0), details.get("host", 0), details.get("storage", 0)


def test_a_server_reads_the_kv_that_sigterm_wrote(launch, tiny_model, tmp_path):
    """SIGTERM writes the KV that only memory holds. The next server reads it, also after evictions, and
    each missed token has one cause."""
    flags = ("--radix-eviction", "wa", *TIER_FLAGS, *disk_flags(tmp_path / "disk"))
    shared = token_ids(64, 1)
    prompts = [shared + token_ids(200, seed) for seed in (2, 3, 4)]
    write_back_flags = (*flags, "--hicache-write-policy", "write_back")
    with launch(tiny_model, *write_back_flags, kv_tokens=POOL_TOKENS) as client:
        first_answers = [client.generate(prompt, 8)["output_ids"] for prompt in prompts]
        assert client.rank()["disk"]["pages"] == 0
        # Only the HTTP process: what Kubernetes and docker stop signal.
        os.kill(client.server.process.pid, signal.SIGTERM)
        client.server.process.wait(timeout=120)
        log = client.server.log_text()
    assert "0 pages are lost" in log, log[-2000:]
    (learnt_file,) = (tmp_path / "disk").glob("*/learnt.json")
    assert learnt_file.stat().st_mode & 0o777 == 0o600
    with launch(tiny_model, *flags, kv_tokens=POOL_TOKENS) as client:
        for prompt, expected in zip(prompts, first_answers):
            answer = client.generate(prompt, 8)
            assert answer["output_ids"] == expected
            assert sum(cached_by_tier(answer)) == 256
        next_turn = client.generate([*prompts[0], *first_answers[0], *prompts[1][-32:]], 1)
        assert sum(cached_by_tier(next_turn)) >= 256
        prompt_tokens = 3 * 264 + 304 + 6 * 900 + 2 * 1024
        check_evicted_prompt_is_loaded_whole(client)
        check_causes_sum_to_the_misses(client, prompt_tokens)
        assert "Traceback" not in client.server.log_text()


def check_evicted_prompt_is_loaded_whole(client: Any) -> None:
    prompt, pages_before = token_ids(1024, 10), client.rank()["disk"]["pages"]

    def wait_for_pages(new_pages: int) -> None:
        wait_until(lambda: client.rank()["disk"]["pages"] >= pages_before + new_pages)

    first_ids = client.generate(prompt, 8)["output_ids"]
    wait_for_pages(64)
    for number in range(6):
        client.generate(token_ids(900, 11 + number), 2)
        wait_for_pages(64 + 56 * (number + 1))
    answer = client.generate(prompt, 8)
    assert answer["output_ids"] == first_ids
    assert cached_by_tier(answer) == (0, 0, 1008)


def check_causes_sum_to_the_misses(client: Any, prompt_tokens: int) -> None:
    prompt, sampling_params = token_ids(600, 30), {"max_new_tokens": 3, "ignore_eos": True, "n": 4}
    client.post("/generate", {"input_ids": token_ids(333, 31), "sampling_params": sampling_params})
    client.generate(prompt, 2)
    client.post("/hicache/storage-backend/clear")
    client.flush()
    client.generate(prompt, 2)
    prompt_tokens += 333 + 1200
    wait_until(lambda: client.rank()["prompt_tokens"] >= prompt_tokens)
    now_unix_s = time.time()
    # Status and metrics are then of one moment.
    wait_until(lambda: client.rank()["time_unix_s"] > now_unix_s + 0.5)
    rank = client.rank()
    tokens_by_cause = rank["missed"]["tokens"]
    hit_tokens = sum(tier["hit_tokens"] for tier in rank["tiers"].values())
    missed_tokens = rank["prompt_tokens"] - hit_tokens
    assert sum(sum(by_tier.values()) for by_tier in tokens_by_cause.values()) == missed_tokens
    assert tokens_by_cause["never_seen"]["none"] >= 6 * 900 + 1024 + 333 + 600
    assert tokens_by_cause["evicted"]["disk"] >= 500, tokens_by_cause
    assert tokens_by_cause["partial_page"]["none"]
    assert tokens_by_cause.get("unknown", {}).get("none", 0) <= 0.02 * missed_tokens
    assert rank["missed"]["corrected_tokens"] == 0
    lines = [line for line in client.get("/metrics").splitlines() if "missed_tokens_total{" in line]
    assert sum(float(line.rpartition(" ")[2]) for line in lines) == missed_tokens


def test_no_server_reads_kv_of_other_weights(launch, small_model, tmp_path) -> None:
    """The models differ in their weights alone. test/storage/test_namespace.py tests the configuration."""
    first_model, second_model = small_model, tmp_path / "other"
    shutil.copytree(first_model, second_model)
    weights = load_file(first_model / "model.safetensors")
    flipped = {name: weight.flip(0).contiguous() for name, weight in weights.items()}
    save_file(flipped, second_model / "model.safetensors", {"format": "pt"})
    flags = ("--radix-eviction", "canopy-lru", *TIER_FLAGS, *disk_flags(tmp_path / "disk"))
    prompt = token_ids(320, 1)

    def answer(written_pages: int = 0) -> tuple[list[int], int]:
        """Return the output ids and the tokens read from the disk, with empty memory. Waits for
        ``written_pages`` pages since the start, since a flush drops pages that wait."""
        client.flush()
        reply = client.generate(prompt, 8)
        device, host, disk = cached_by_tier(reply)
        assert device == host == 0
        wait_until(lambda: client.rank()["disk"]["written_pages"] >= written_pages)
        return reply["output_ids"], disk

    with launch(second_model, *flags) as client:
        second_ids = answer(written_pages=20)[0]
    with launch(first_model, *flags) as client:
        first_ids, disk_tokens = answer(written_pages=20)
        assert disk_tokens == 0
        assert first_ids != second_ids
        assert answer() == (first_ids, 304)
        client.post("/update_weights_from_disk", {"model_path": str(second_model)})
        assert answer() == (second_ids, 0)
        # The disk tier opens again within seconds, with pages of the new weights.
        assert wait_until(lambda: (reply := answer())[1] and reply) == (second_ids, 304)


def test_two_servers_at_once_share_pages_and_ttls_become_pins(
    cluster, launch, tiny_model, tmp_path
) -> None:
    """A server reads the pages of another; under pressure, pages with a TTL stay and others are evicted."""
    ttl = {"residual_ttl_s": 0, "categories": {"system": 3600}}
    flags = ("--radix-eviction", "wa", "--canopy-ttl", json.dumps(ttl), *cluster.flags())
    pinned, unpinned = [[(i * step) % 9000 + 100 for i in range(320)] for step in (37, 53)]
    prompt_pages = 320 // PAGE_TOKENS
    with (
        launch(tiny_model, *flags, kv_tokens=2048) as writer,
        launch(tiny_model, *flags, kv_tokens=2048) as reader,
    ):
        written = writer.generate(pinned, 8, custom_params={"canopy_category": "system"})
        writer.generate(unpinned, 8, custom_params={"canopy_category": "once"})
        wait_until(lambda: cluster.read_metric("master_key_count") >= 2 * 2 * prompt_pages)
        assert cluster.read_metric("master_soft_pin_key_count") == 2 * prompt_pages

        read = reader.generate(pinned, 8, custom_params={"canopy_category": "system"})
        details = read["meta_info"]["cached_tokens_details"]
        assert details["storage"] == 320 - PAGE_TOKENS  # a prompt's last page is computed
        assert read["output_ids"] == written["output_ids"]

        segment_objects = SEGMENT_BYTES // (64 << 10)

        def is_evicting() -> bool:
            stored = cluster.fill(segment_objects // 4)
            return stored > 0 and cluster.read_metric("master_evicted_key_count") > segment_objects

        wait_until(is_evicting)
        reader.flush()
        assert reader.cached(pinned)["storage"] == 320 - PAGE_TOKENS
        assert reader.cached(unpinned)["storage"] == 0
