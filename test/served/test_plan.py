"""Servers started with the ``--config`` that ``canopy plan`` wrote for them, and the examples that need a server."""

import json
import os
import random
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

import agents
from canopy_lab.cli.main import main
from canopy_lab.live.profile.client import wait_until
from canopy_lab.plan.server_plan import read_config, write_config
from canopy_lab.sim.system import load_profile
from canopy_lab.trace.served_log import read_served
from environment import ROOT
from launch_server import ServerProcess, cpu_arguments, free_port, wait_until_ready
from support.document_client import reuse_flag, wait_until_encoded
from support.example_files import EXAMPLES, load_example
from support.served import wait_until as wait_for_value

pytestmark = pytest.mark.long
EXTRA_CONFIG = "hicache-storage-backend-extra-config"
PAGE_TOKENS = 64
DEVICE_TOKENS = 2048
POOL_TOKENS = 4096
LOGGING_FLAGS = ("--log-requests", "--log-requests-level", "3", "--log-requests-format", "json")
TOKEN_BYTES = 2 * 2 * 2 * 32 * 4  # k and v, layers, heads, head size, float32
PROFILE_CHANGE = {"kv_bytes_per_token": TOKEN_BYTES}


@pytest.fixture(scope="module")
def plan(tmp_path_factory):
    """A plan for six growing conversations that arrive faster than the engine serves them: a disk pays off at once."""
    folder = tmp_path_factory.mktemp("plan")
    rng, paths, ids, lines = random.Random(0), [[] for _ in range(6)], iter(range(10_000)), []
    for number in range(60):
        path = rng.choice(paths)
        path += [next(ids)]
        lines.append({"timestamp": number * 2000, "input_length": len(path) * 512, "output_length": 4,
                      "hash_ids": list(path)})  # fmt: skip
        if len(path) == 3:
            path.clear()
    trace, profile = folder / "trace.jsonl", folder / "profile.json"
    trace.write_text("".join(json.dumps(line) + "\n" for line in lines))
    profile_fields = load_profile("smollm2-135m-cpu").to_json() | PROFILE_CHANGE
    profile.write_text(json.dumps(profile_fields))
    plan = folder / "plan.yaml"
    search = f"dram_gib={2**-8},dram_levels=1,disk_gib={2**-5},disk_levels=1"
    tier_flags = ("--search", search, "--disks", "gp3")
    command = ["plan", str(trace), "--format", "mooncake", "--profile", f"{profile}=0.05"]
    command += ["--device-tokens", str(DEVICE_TOKENS), "--ttl", "900", "--policy", "wa"]
    command += [*tier_flags, "--best", "mean_ttft", "--jobs", "1"]
    command += ["--instances", "2", "--routing", "round-robin"]
    server = f"page_size={PAGE_TOKENS},prefetch_policy=wait_complete,max_running_requests=48"
    command += ["--server", f"{server},chunked_prefill_size=1024,prefetch_threshold=128"]
    command += ["--disk-path", str(folder / "disk"), "--out", str(plan)]
    assert main(command) == 0
    return plan


@pytest.fixture
def client(plan, shared_server, tiny_model):
    return shared_server(tiny_model, "--config", str(plan), *LOGGING_FLAGS, kv_tokens=DEVICE_TOKENS)


def write_variant(plan, name, **flags):
    """Write a copy of the plan with other flags; return its path. A store locks its folder, so the copy has its own."""
    config = read_config(plan) | flags
    config[EXTRA_CONFIG]["path"] = str(plan.parent / f"{name}-disk")
    write_config(plan.parent / f"{name}.yaml", config, {})
    return str(plan.parent / f"{name}.yaml")


@pytest.fixture
def second_server(plan, shared_server, tiny_model):
    """A second server on the machine."""
    second_plan = write_variant(plan, "second")
    return shared_server(tiny_model, "--config", second_plan, kv_tokens=DEVICE_TOKENS)


def planned_bytes(plan):
    """Return the planned bytes of host memory and disk."""
    config = read_config(plan)
    return round(config["canopy-host-gb"] * 1e9), config[EXTRA_CONFIG]["capacity_bytes"]


def check_tiers(server, plan):
    """Check that the server has the planned sizes and policies."""
    host_bytes, disk_bytes = planned_bytes(plan)
    (rank,) = wait_for_value(lambda: server.status()["ranks"])
    assert rank["policies"] == {"device": "wa", "host": "wa", "disk": "wa"}
    capacity_bytes = {name: tier["capacity_bytes"] for name, tier in rank["tiers"].items()}
    assert host_bytes <= capacity_bytes["host"] <= host_bytes + 2 * PAGE_TOKENS * TOKEN_BYTES
    assert capacity_bytes["disk"] == disk_bytes
    assert [group["ttl_s"] for group in rank["groups"]] == [900]


def test_two_servers_start_as_planned_and_serve_side_by_side(client, second_server, plan):
    host_bytes, disk_bytes = planned_bytes(plan)
    assert 2**20 <= host_bytes <= 2**22
    assert disk_bytes <= 2**25
    assert "# instances: 2" in plan.read_text()
    prompts = [list(range(start, start + 6 * PAGE_TOKENS)) for start in range(2000, 6000, 500)]
    for number, prompt in enumerate(prompts):  # in turn, as a router does
        (client, second_server)[number % 2].generate(prompt)
    for number, prompt in enumerate(prompts):
        assert (client, second_server)[number % 2].cached(prompt)["total"] >= 5 * PAGE_TOKENS
    for server in (client, second_server):
        check_tiers(server, plan)


def test_sglangs_settings_are_the_plans(client, plan):
    planned_settings = {name.replace("-", "_"): value for name, value in read_config(plan).items()}
    assert (planned_settings["page_size"], planned_settings["max_total_tokens"]) == (
        PAGE_TOKENS,
        DEVICE_TOKENS,
    )
    server_info = json.loads(client.get("/server_info"))
    for name in (*("page_size", "chunked_prefill_size", "max_prefill_tokens", "schedule_policy"),
                 *("schedule_conservativeness", "hicache_write_policy", "max_running_requests"),
                 *("hicache_storage_prefetch_policy", "enable_hierarchical_cache")):  # fmt: skip
        assert server_info[name] == planned_settings[name], name
    extra_config = json.loads(server_info["hicache_storage_backend_extra_config"])
    planned_config = read_config(plan)[EXTRA_CONFIG]
    assert extra_config["prefetch_threshold"] == planned_config["prefetch_threshold"] == 128


def test_a_servers_log_is_compared_with_the_simulation(client, plan, tmp_path):
    rng = random.Random(1)
    first_tokens = [7000 + 10 * number for number in range(6)]
    for _ in range(40):
        first_token = rng.choice(first_tokens)
        client.generate([first_token, *range(8000, 8000 + 3 * PAGE_TOKENS)], output_tokens=4)
    log = client.server.log
    assert wait_until(lambda: len(read_served(log)) >= 40, 30)
    errors_path = tmp_path / "errors.json"
    profile = str(plan.parent / "profile.json")
    command = ["validate", str(log), "--plan", str(plan), "--profile", profile]
    assert main([*command, "--disk-mib-per-s", "500", "--json-out", str(errors_path)]) == 0
    report = json.loads(errors_path.read_text())
    assert report["requests"] >= 36
    assert report["seen"]["mean_ttft_s"] > 0
    assert set(report["errors"]) >= {"throughput_tokens_per_s", "disk_hit_ratio", "p99_ttft_s"}
    # The profile is a larger model's: its times are far off, and the hits are right all the same.
    assert abs(report["errors"]["token_hit_ratio"]) < 0.02


def test_the_tiers_of_a_server_are_profiled(plan, shared_server, tiny_model, tmp_path):
    """The host holds more than the device and one prompt: a smaller one would evict the prompt to read."""
    host_gb = 4 * DEVICE_TOKENS * TOKEN_BYTES / 1e9
    larger_plan = write_variant(plan, "larger", **{"canopy-host-gb": host_gb})
    server = shared_server(tiny_model, "--config", larger_plan, kv_tokens=DEVICE_TOKENS)
    profile_path = tmp_path / "profile.json"
    limits = ["--max-prompt-tokens", "64", "--max-context-tokens", "256", "--max-batch", "1"]
    command = ["profile", "--url", server.url, "--out", str(profile_path), "--repeats", "1"]
    assert main([*command, *limits]) == 0
    profile = load_profile(profile_path)
    for tier in (profile.host, profile.disk):
        assert tier is not None
        assert 1e4 < tier.read_bytes_per_s < 1e12
        assert 1e4 < tier.write_bytes_per_s < 1e12


@pytest.fixture
def logging_server(shared_server, tiny_model):
    flags = ("--radix-eviction", "wa", "--canopy-documents", "on", *LOGGING_FLAGS)
    return shared_server(tiny_model, *flags, kv_tokens=POOL_TOKENS)


def test_an_agent_hints_and_two_tenants_stay_apart(logging_server) -> None:
    assert len(load_example("agent_loop").main(logging_server.url, "Which leaf goes first?")) == 3
    cached = load_example("two_tenants").main(logging_server.url)
    assert cached["ann"][0] == cached["bob"][0] == 0
    assert cached["ann"][1] == cached["bob"][1] > 50


def test_the_quick_starts_agents_work_and_find_their_conversations_cached(logging_server) -> None:
    traffic = agents.AgentTraffic(logging_server.url, "m", agents.read_texts([ROOT / "docs"]))
    answer_counts: list[int] = []
    answers = traffic.run(20, lambda so_far: answer_counts.append(len(so_far)))
    outcome = agents.outcome_of(answers)
    assert answer_counts[-1] == len(answers) >= outcome.steps > agents.AGENT_COUNT
    assert outcome.hit_ratio > 0.2  # the instructions alone are more of the first prompts
    assert outcome.first_token_s > 0


def test_documents_in_another_order_are_reused(logging_server) -> None:
    first_answer, second_answer = load_example("rag_documents").main(logging_server.url)
    assert not first_answer["fused"]
    assert second_answer["fused"]
    assert second_answer["reused"] > second_answer["recomputed"] > 0


def test_documents_of_langchain_are_reused(shared_server, tiny_model, monkeypatch) -> None:
    """Runs if LangChain is installed; test_document_answers.py sends the same bodies without it."""
    pytest.importorskip("langchain_classic")
    client = shared_server(tiny_model, *reuse_flag(separator="\n###\n"), kv_tokens=POOL_TOKENS)
    module = load_example("documents_langchain")
    clock = SimpleNamespace(sleep=lambda _seconds: wait_until_encoded(client))
    monkeypatch.setattr(module, "time", clock)
    first_answer, second_answer, reordered = module.main(client.url)
    assert first_answer["reused_tokens"] == 0
    assert second_answer["reused_tokens"] > second_answer["recomputed_tokens"] > 0
    assert not reordered or reordered["reused_tokens"] == 0


def test_a_log_becomes_a_plan_and_a_server_that_follows_it(logging_server, tiny_model, tmp_path):
    for task in ("Which leaf goes first?", "Which one stays?", "Who asked for it?"):
        load_example("agent_loop").main(logging_server.url, task)
    log = logging_server.server.log
    assert wait_until(lambda: len(read_served(log)) >= 9, 30)
    profile_fields = load_profile("smollm2-135m-cpu").to_json() | PROFILE_CHANGE
    profile = tmp_path / "profile.json"
    profile.write_text(json.dumps(profile_fields))
    plan = f"--profile {profile}=0.05 --device-tokens {POOL_TOKENS} --policy wa --disks none"
    plan += f" --search dram_gib={2**-8},dram_levels=1 --server page_size=16 --jobs 1"
    port, commands_folder = free_port(), Path(sys.executable).parent
    command = [EXAMPLES / "log_to_server.sh", log, tiny_model, "--load-format", "dummy"]
    command += [*cpu_arguments(tiny_model, kv_tokens=POOL_TOKENS, dtype="float32")[2:]]
    log_file = tmp_path / "server.log"
    with log_file.open("wb") as output:
        process = subprocess.Popen(
            [*command, "--port", str(port)],
            cwd=tmp_path,
            env={**os.environ, "PLAN": plan, "PATH": f"{commands_folder}:{os.environ['PATH']}"},
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    server = ServerProcess(f"http://127.0.0.1:{port}", log_file, process)
    try:
        wait_until_ready(server, 240)
        server_info = json.loads(type(logging_server)(server).get("/server_info"))
    finally:
        server.stop(0)
    config = read_config(tmp_path / "plan.yaml")
    assert config["radix-eviction"] == server_info["radix_eviction_policy"] == "wa"
    assert config["page-size"] == server_info["page_size"] == 16
    assert (tmp_path / "advice.html").exists()
    assert (tmp_path / "plan.html").exists()
