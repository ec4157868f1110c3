"""The examples that need a server, against real servers: correct output, and a server planned from a log."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

import agents
from canopy_lab.live.profile.client import wait_until
from canopy_lab.plan.server_plan import read_config
from canopy_lab.sim.system import load_profile
from canopy_lab.trace.served_log import read_served
from environment import ROOT
from launch_server import Server, cpu_arguments, free_port, wait_until_ready
from support.document_client import on, wait_until_encoded
from support.example_files import EXAMPLES, load

KV_TOKENS = 4096
KV_BYTES = 2 * 2 * 2 * 32 * 4  # k and v, layers, heads, size, float32: the tiny model's
LOGGED = ("--log-requests", "--log-requests-level", "3", "--log-requests-format", "json")


@pytest.fixture
def client(shared_server, tiny_model):
    flags = ("--radix-eviction", "wa", "--canopy-documents", "on", *LOGGED)
    return shared_server(tiny_model, *flags, kv_tokens=KV_TOKENS)


@pytest.mark.long
def test_an_agent_hints_and_two_tenants_stay_apart(client) -> None:
    answers = load("agent_loop").main(client.url, "Which leaf goes first?")
    assert len(answers) == 3
    found = load("two_tenants").main(client.url)
    assert found["ann"][0] == found["bob"][0] == 0
    assert found["ann"][1] == found["bob"][1] > 50


@pytest.mark.long
def test_the_quick_starts_agents_work_and_find_their_conversations_cached(client) -> None:
    traffic = agents.Traffic(client.url, "m", agents.read_texts([ROOT / "docs"]))
    seen: list[int] = []
    answers = traffic.run(20, lambda so_far: seen.append(len(so_far)))
    found = agents.outcome(answers)
    assert seen[-1] == len(answers) >= found.steps > agents.AGENTS
    assert found.hit_ratio > 0.2  # the instructions alone are more of the first prompts
    assert found.first_token_s > 0


@pytest.mark.long
def test_documents_in_another_order_are_reused(client) -> None:
    first, second = load("rag_documents").main(client.url)
    assert not first["fused"]
    assert second["fused"]
    assert second["reused"] > second["recomputed"] > 0


@pytest.mark.long
def test_documents_of_langchain_are_reused(shared_server, tiny_model, monkeypatch) -> None:
    """Runs if LangChain is installed; test_document_answers.py sends the same bodies without it."""
    pytest.importorskip("langchain_classic")
    client = shared_server(tiny_model, *on(separator="\n###\n"), kv_tokens=KV_TOKENS)
    module = load("documents_langchain")
    waits = SimpleNamespace(sleep=lambda _seconds: wait_until_encoded(client))
    monkeypatch.setattr(module, "time", waits)
    first, second, none = module.main(client.url)
    assert first["reused_tokens"] == 0
    assert second["reused_tokens"] > second["recomputed_tokens"] > 0
    assert not none or none["reused_tokens"] == 0


@pytest.mark.long
def test_a_log_becomes_a_plan_and_a_server_that_follows_it(client, tiny_model, tmp_path) -> None:
    for task in ("Which leaf goes first?", "Which one stays?", "Who asked for it?"):
        load("agent_loop").main(client.url, task)
    log = client.server.log
    assert wait_until(lambda: len(read_served(log)) >= 9, 30)
    engine = load_profile("smollm2-135m-cpu").to_json() | {"kv_bytes_per_token": KV_BYTES}
    profile = tmp_path / "profile.json"
    profile.write_text(json.dumps(engine))
    plan = f"--compare {profile}=0.05 --device-tokens {KV_TOKENS} --policy wa --disks none"
    plan += f" --search dram_gib={2**-8},dram_levels=1 --server page_size=16 --jobs 1"
    port, tools = free_port(), Path(sys.executable).parent
    command = [EXAMPLES / "log_to_server.sh", log, tiny_model, "--load-format", "dummy"]
    command += [*cpu_arguments(tiny_model, kv_tokens=KV_TOKENS, dtype="float32")[2:]]
    said = tmp_path / "server.log"
    with said.open("wb") as output:
        process = subprocess.Popen(
            [*command, "--port", str(port)],
            cwd=tmp_path,
            env={**os.environ, "PLAN": plan, "PATH": f"{tools}:{os.environ['PATH']}"},
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    server = Server(f"http://127.0.0.1:{port}", said, process)
    try:
        wait_until_ready(server, 240)
        facts = json.loads(type(client)(server).get("/server_info"))
    finally:
        server.stop(0)
    made = read_config(tmp_path / "plan.yaml")
    assert made["radix-eviction"] == facts["radix_eviction_policy"] == "wa"
    assert made["page-size"] == facts["page_size"] == 16
    assert (tmp_path / "advice.html").exists()
    assert (tmp_path / "plan.html").exists()
