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

from support.mooncake_cluster import PAGE, SEGMENT_BYTES, cluster, wheel
from support.prompts import token_ids
from support.served import disk_flags, until

__all__ = ["cluster", "wheel"]
pytestmark = pytest.mark.long
TIERS = ("--page-size", "16", "--enable-hierarchical-cache", "--hicache-ratio", "2")
POOL = 1280


def cached(answer: dict[str, Any]) -> tuple[int, int, int]:
    """Return the cached tokens on the device, on the host and on the disk."""
    of = answer["meta_info"].get("cached_tokens_details") or {}
    return of.get("device", 0), of.get("host", 0), of.get("storage", 0)


def test_a_server_that_received_sigterm_is_continued_by_the_next(server, tiny_model, tmp_path):
    """SIGTERM writes the KV that only memory holds. The next server reads it, whatever it evicts since,
    and each missed token has one cause."""
    flags = ("--radix-eviction", "wa", *TIERS, *disk_flags(tmp_path / "disk"))
    shared = token_ids(64, 1)
    prompts = [shared + token_ids(200, seed) for seed in (2, 3, 4)]
    with server(
        tiny_model, *flags, "--hicache-write-policy", "write_back", kv_tokens=POOL
    ) as client:
        first = [client.generate(prompt, 8)["output_ids"] for prompt in prompts]
        assert client.rank()["disk"]["pages"] == 0
        # Only the HTTP process: what Kubernetes and docker stop signal.
        os.kill(client.server.process.pid, signal.SIGTERM)
        client.server.process.wait(timeout=120)
        log = client.server.log_text()
    assert "0 pages are lost" in log, log[-2000:]
    assert [f.stat().st_mode & 0o777 for f in (tmp_path / "disk").glob("*/learnt.json")] == [0o600]
    with server(tiny_model, *flags, kv_tokens=POOL) as client:
        for prompt, before in zip(prompts, first):
            answer = client.generate(prompt, 8)
            assert answer["output_ids"] == before
            assert sum(cached(answer)) == 256
        again = client.generate([*prompts[0], *first[0], *prompts[1][-32:]], 1)
        assert sum(cached(again)) >= 256
        sent = 3 * 264 + 304 + 6 * 900 + 2 * 1024
        evicted_prompt_is_loaded_whole(client)
        causes_sum_to_the_misses(client, sent)
        assert "Traceback" not in client.server.log_text()


def evicted_prompt_is_loaded_whole(client: Any) -> None:
    prompt, before = token_ids(1024, 10), client.rank()["disk"]["pages"]

    def written(pages: int) -> None:
        until(lambda: client.rank()["disk"]["pages"] >= before + pages)

    first = client.generate(prompt, 8)["output_ids"]
    written(64)
    for number in range(6):
        client.generate(token_ids(900, 11 + number), 2)
        written(64 + 56 * (number + 1))
    again = client.generate(prompt, 8)
    assert again["output_ids"] == first
    assert cached(again) == (0, 0, 1008)


def causes_sum_to_the_misses(client: Any, sent: int) -> None:
    same, samples = token_ids(600, 30), {"max_new_tokens": 3, "ignore_eos": True, "n": 4}
    client.post("/generate", {"input_ids": token_ids(333, 31), "sampling_params": samples})
    client.generate(same, 2)
    client.post("/hicache/storage-backend/clear")
    client.flush()
    client.generate(same, 2)
    sent += 333 + 1200
    until(lambda: client.rank()["prompt_tokens"] >= sent)
    asked = time.time()
    until(lambda: client.rank()["time_unix_s"] > asked + 0.5)  # rows and causes are of one moment
    rank = client.rank()
    tokens = rank["missed"]["tokens"]
    missed = rank["prompt_tokens"] - sum(tier["hit_tokens"] for tier in rank["tiers"].values())
    assert sum(n for row in tokens.values() for n in row.values()) == missed
    assert tokens["never_seen"]["none"] >= 6 * 900 + 1024 + 333 + 600
    assert tokens["evicted"]["disk"] >= 500, tokens
    assert tokens["partial_page"]["none"]
    assert tokens.get("unknown", {}).get("none", 0) <= 0.02 * missed
    assert rank["missed"]["corrected_tokens"] == 0
    lines = [line for line in client.get("/metrics").splitlines() if "missed_tokens_total{" in line]
    assert sum(float(line.rpartition(" ")[2]) for line in lines) == missed


def test_no_server_reads_kv_of_other_weights(server, small_model, tmp_path) -> None:
    """The models differ in their weights alone. Which parts of a configuration count:
    test/storage/test_namespace.py."""
    first, second = small_model, tmp_path / "other"
    shutil.copytree(first, second)
    weights = load_file(first / "model.safetensors")
    turned = {name: weight.flip(0).contiguous() for name, weight in weights.items()}
    save_file(turned, second / "model.safetensors", {"format": "pt"})
    flags = ("--radix-eviction", "canopy-lru", *TIERS, *disk_flags(tmp_path / "disk"))
    prompt = token_ids(320, 1)

    def answer(written: int = 0) -> tuple[list[int], int]:
        """Return the output ids and the tokens read from the disk, with empty memory.

        Waits for ``written`` pages since the start, since a flush drops pages that wait.
        """
        client.flush()
        reply = client.generate(prompt, 8)
        device, host, disk = cached(reply)
        assert device == host == 0
        until(lambda: client.rank()["disk"]["written_pages"] >= written)
        return reply["output_ids"], disk

    with server(second, *flags) as client:
        of_second = answer(written=20)[0]
    with server(first, *flags) as client:
        of_first, stored = answer(written=20)
        assert stored == 0
        assert of_first != of_second
        assert answer() == (of_first, 304)
        client.post("/update_weights_from_disk", {"model_path": str(second)})
        assert answer() == (of_second, 0)
        # The tier restarts within seconds, and its pages are the new ones.
        assert until(lambda: (found := answer())[1] and found) == (of_second, 304)


def test_two_servers_at_once_share_pages_and_ttls_become_pins(
    cluster, server, tiny_model, tmp_path
) -> None:
    """A server reads the pages of another; under pressure, pages with a TTL stay and others are evicted."""
    ttl = {"residual_ttl_s": 0, "categories": {"system": 3600}}
    flags = ("--radix-eviction", "wa", "--canopy-ttl", json.dumps(ttl), *cluster.flags())
    keep, drop = [[(i * step) % 9000 + 100 for i in range(320)] for step in (37, 53)]
    pages = 320 // PAGE
    with (
        server(tiny_model, *flags, kv_tokens=2048) as writer,
        server(tiny_model, *flags, kv_tokens=2048) as reader,
    ):
        first = writer.generate(keep, 8, custom_params={"canopy_category": "system"})
        writer.generate(drop, 8, custom_params={"canopy_category": "once"})
        until(lambda: cluster.count("master_key_count") >= 2 * 2 * pages)  # K and V of both
        assert cluster.count("master_soft_pin_key_count") == 2 * pages

        second = reader.generate(keep, 8, custom_params={"canopy_category": "system"})
        found = second["meta_info"]["cached_tokens_details"]
        assert found["storage"] == 320 - PAGE  # a prompt's last page is computed
        assert second["output_ids"] == first["output_ids"]

        room = SEGMENT_BYTES // (64 << 10)
        until(lambda: cluster.fill(room // 4) and cluster.count("master_evicted_key_count") > room)
        reader.flush()
        assert reader.cached(keep)["storage"] == 320 - PAGE
        assert reader.cached(drop)["storage"] == 0
