"""Real servers on one disk tier: no KV of another configuration, or of the weights before."""

import json
import shutil
import time
from pathlib import Path

import pytest
import torch

FLAGS = (
    *("--page-size", "16", "--radix-eviction", "canopy-lru"),
    *("--enable-hierarchical-cache", "--hicache-ratio", "2"),
    *("--hicache-storage-backend", "canopy"),
    *("--hicache-storage-prefetch-policy", "wait_complete"),
)
PROMPT = [1000 + 7 * i for i in range(320)]
PAGES = 20
WAIT_S = 60.0


@pytest.fixture(scope="module")
def models(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two models that differ in their weights alone."""
    from transformers import AutoConfig, AutoModelForCausalLM

    found = []
    for seed in (1, 2):
        folder = tmp_path_factory.mktemp(f"weights-{seed}") / "model"
        shutil.copytree(tiny_model, folder)
        torch.manual_seed(seed)
        config = AutoConfig.from_pretrained(folder)
        config.initializer_range = 0.3  # so that an output depends on all tokens
        AutoModelForCausalLM.from_config(config).save_pretrained(folder)
        shutil.copyfile(tiny_model / "config.json", folder / "config.json")
        found.append(folder)
    return found


def disk(client) -> dict:
    return json.loads(client.get("/canopy/status"))["ranks"][0]["disk"]


def until(said) -> None:
    """Wait for a state of the server."""
    deadline = time.monotonic() + WAIT_S
    while not said():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def answer(client, written: int = 0) -> tuple[list[int], int]:
    """Return the output ids and the prompt tokens read from the disk, with empty memory.

    Waits until the server has ``written`` that number of pages since its start, since a flush drops
    pages that wait to be written.
    """
    client.flush()
    found = client.generate(PROMPT, 8)
    details = found["meta_info"].get("cached_tokens_details") or {}
    assert found["meta_info"]["cached_tokens"] == details.get("storage", 0)
    until(lambda: disk(client)["written_pages"] >= written)
    return found["output_ids"], details.get("storage", 0)


@pytest.mark.long
def test_no_server_reads_kv_of_other_weights_or_another_configuration(
    server, models, tmp_path
) -> None:
    first, second = models
    extra = {"path": str(tmp_path / "disk"), "capacity_gb": 0.1, "prefetch_threshold": 16}
    flags = (*FLAGS, "--hicache-storage-backend-extra-config", json.dumps(extra))

    with server(second, *flags) as client:
        second_says, stored = answer(client, PAGES)
        assert stored == 0

    override = {"rope_parameters": {"rope_type": "default", "rope_theta": 50.0}}
    rope = ("--json-model-override-args", json.dumps(override))
    with server(first, *flags, *rope) as client:
        other_says, stored = answer(client, PAGES)
        assert stored == 0

    with server(first, *flags) as client:
        first_says, stored = answer(client, PAGES)
        assert stored == 0  # neither the other model's nor the other configuration's
        assert answer(client) == (first_says, 304)
        assert len({tuple(says) for says in (first_says, second_says, other_says)}) == 3
        client.post("/update_weights_from_disk", {"model_path": str(second)})
        assert answer(client) == (second_says, 0)
        stored = 0
        deadline = time.monotonic() + WAIT_S
        while stored == 0:  # the tier restarts within seconds, and its pages are the new ones
            assert time.monotonic() < deadline
            says, stored = answer(client)
            assert says == second_says
        assert stored == 304

    with server(first, *flags, *rope) as client:  # a restart
        assert answer(client) == (other_says, 304)
