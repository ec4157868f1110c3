"""Real servers with device, host and disk: same answers, and a restart that finds its pages."""

import json
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.long
def test_three_tiers_leave_answers_unchanged_and_a_restart_is_served_from_disk(tiny_model):
    command = [sys.executable, str(ROOT / "benchmark" / "tiers" / "live.py")]
    command += ["--model", str(tiny_model), "--prompts", "60", "--kills", "0", "--tokens", "4"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    result = json.loads(done.stdout)
    assert result["wrong"] == result["restart"]["wrong"] == 0
    assert min(result["hits"].values()) > 0, result["hits"]
    assert result["restart"]["from_storage"] >= 0.95 * result["restart"]["tokens"]


@pytest.mark.long
def test_buffer_only_host_memory_returns_pages_of_the_disk(server, tiny_model, tmp_path):
    extra = {"path": str(tmp_path / "disk"), "capacity_gb": 0.1, "prefetch_threshold": 16}
    flags = (
        *("--page-size", "16", "--radix-eviction", "wa"),
        *("--enable-hierarchical-cache", "--hicache-ratio", "2"),
        *("--hicache-host-memory-mode", "buffer_only"),
        *("--hicache-storage-backend", "canopy"),
        *("--hicache-storage-prefetch-policy", "wait_complete"),
        *("--hicache-storage-backend-extra-config", json.dumps(extra)),
    )
    prompt = [1000 + 7 * i for i in range(320)]
    with server(tiny_model, *flags) as client:

        def disk() -> dict:
            return json.loads(client.get("/canopy/status"))["ranks"][0]["disk"]

        said = client.generate(prompt, 8, {"canopy_category": "agent"})["output_ids"]
        deadline = time.monotonic() + 60.0
        while disk()["pages"] < 20:
            assert time.monotonic() < deadline, disk()
            time.sleep(0.1)
        client.flush()
        again = client.generate(prompt, 8, {"canopy_category": "agent"})
        assert again["output_ids"] == said
        assert again["meta_info"]["cached_tokens_details"]["storage"] == 304


@pytest.mark.long
def test_a_prompt_evicted_from_device_and_host_is_loaded_whole_from_disk(
    server, tiny_model, tmp_path
):
    extra = {"path": str(tmp_path / "disk"), "capacity_gb": 0.1, "prefetch_threshold": 16}
    flags = (
        *("--page-size", "16", "--radix-eviction", "wa"),
        *("--enable-hierarchical-cache", "--hicache-ratio", "2"),
        *("--hicache-storage-backend", "canopy"),
        *("--hicache-storage-prefetch-policy", "wait_complete"),
        *("--hicache-storage-backend-extra-config", json.dumps(extra)),
    )
    draw = random.Random(1)

    def tokens(count: int) -> list[int]:
        return [draw.randrange(1000, 9000) for _ in range(count)]

    prompt = tokens(1024)
    with server(tiny_model, *flags, kv_tokens=1280) as client:

        def written(pages: int) -> None:
            deadline = time.monotonic() + 60.0
            while json.loads(client.get("/canopy/status"))["ranks"][0]["disk"]["pages"] < pages:
                assert time.monotonic() < deadline
                time.sleep(0.1)

        said = client.generate(prompt, 8)["output_ids"]
        written(64)
        for number in range(6):
            client.generate(tokens(900), 2)
            written(64 + 56 * (number + 1))
        again = client.generate(prompt, 8)
        assert again["output_ids"] == said
        found = again["meta_info"]["cached_tokens_details"]
        assert (found["device"], found["host"], found["storage"]) == (0, 0, 1008)
