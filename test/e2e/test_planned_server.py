"""A server started with the file that ``canopy plan`` wrote for it."""

from __future__ import annotations

import json
import random

import pytest

from sglang_canopy.cli.main import main
from sglang_canopy.config.plan_file import read_plan
from sglang_canopy.profiling.client import wait_until
from sglang_canopy.sim.system import load_profile

PAGE = 64
DEVICE_TOKENS = 2048
KV_BYTES = 2 * 2 * 2 * 32 * 4  # k and v, layers, heads, size, float32


def planned(folder):
    """Six conversations that grow, faster than the engine serves them: a disk pays at once."""
    draw, paths, ids, lines = random.Random(0), [[] for _ in range(6)], iter(range(10_000)), []
    for at in range(60):
        path = draw.choice(paths)
        path += [next(ids)]
        lines.append({"timestamp": at * 2000, "input_length": len(path) * 512, "output_length": 4,
                      "hash_ids": list(path)})  # fmt: skip
        if len(path) == 3:
            path.clear()
    trace, profile = folder / "trace.jsonl", folder / "profile.json"
    trace.write_text("".join(json.dumps(line) + "\n" for line in lines))
    engine = load_profile("smollm2-135m-cpu").to_json() | {"kv_bytes_per_token": KV_BYTES}
    profile.write_text(json.dumps(engine))
    plan = folder / "plan.json"
    sizes = ("--dram-max-gib", str(2**-8), "--dram-levels", "1")
    sizes += ("--disk-max-gib", str(2**-5), "--disk-levels", "1", "--disks", "gp3-1000")
    command = ["plan", str(trace), "--format", "mooncake", "--profile", str(profile), *sizes]
    command += ["--device-tokens", str(DEVICE_TOKENS), "--ttl", "900", "--device-policy", "wa"]
    command += ["--host-policy", "wa", "--minimise", "mean_ttft", "--no-cache", "--jobs", "1"]
    command += ["--disk-path", str(folder / "disk"), "--output", str(plan)]
    assert main(command) == 0
    return plan


@pytest.fixture(scope="module")
def plan(tmp_path_factory):
    return planned(tmp_path_factory.mktemp("plan"))


@pytest.fixture
def client(plan, shared_server, tiny_model):
    flags = ["--enable-hierarchical-cache", "--hicache-storage-backend", "canopy"]
    flags += ["--hicache-storage-prefetch-policy", "wait_complete"]
    flags += ["--page-size", str(PAGE), "--canopy-plan", str(plan)]
    return shared_server(tiny_model, *flags, kv_tokens=DEVICE_TOKENS)


def test_a_server_starts_as_planned(client, plan):
    said = read_plan(plan)
    assert (said.host_bytes, said.disk_bytes) == (2**22, 2**25)
    assert wait_until(lambda: json.loads(client.get("/canopy/status"))["ranks"], 30)
    (rank,) = json.loads(client.get("/canopy/status"))["ranks"]
    assert rank["policies"] == {"device": "wa", "host": "wa", "disk": "canopy-lru"}
    host, disk = (rank["tiers"][tier]["capacity_bytes"] for tier in ("host", "disk"))
    assert said.host_bytes <= host <= said.host_bytes + 2 * PAGE * KV_BYTES
    assert disk == said.disk_bytes
    assert [group["ttl_s"] for group in rank["groups"]] == [said.ttl.residual_ttl_s] == [900]
    prompt = list(range(1000, 1000 + 8 * PAGE))
    client.generate(prompt)
    assert client.cached(prompt)["total"] >= 7 * PAGE


def test_its_tiers_can_be_profiled(client, tmp_path):
    out = tmp_path / "profile.json"
    limits = ["--max-prompt", "64", "--max-context", "256", "--max-batch", "1", "--repeats", "1"]
    assert main(["profile", "--url", client.url, "--output", str(out), *limits]) == 0
    profile = load_profile(out)
    for tier in (profile.host_tier(1e6), profile.disk_tier(1e6)):
        assert 1e4 < tier.read_bytes_per_s < 1e12
        assert 1e4 < tier.write_bytes_per_s < 1e12
