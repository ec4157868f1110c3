"""A log of another program, all the way: advice, a plan, and a server's own check of it."""

import json
from pathlib import Path

import pytest

from canopy_lab.cli.main import main
from canopy_lab.plan.server_plan import read_config

SESSION_COUNT, TURN_COUNT = 16, 6


def write_litellm_log(path: Path) -> str:
    """Write LiteLLM's ``StandardLoggingPayload`` of sessions among single prompts, a call a second."""
    lines = []
    for i in range(2 * SESSION_COUNT * TURN_COUNT):
        session_number, turn = i // 2 % SESSION_COUNT, i // 2 // SESSION_COUNT
        texts = [f"session {session_number} step {k} " * 40 for k in range(turn + 1)]
        session = f"s{session_number}"
        if i % 2:
            texts, session = [f"scan {i} of a long file " * 120], None
        entry = {
            "id": f"chatcmpl-{i}", "call_type": "acompletion", "status": "success", "model": "m",
            "startTime": 1.7e9 + i, "endTime": 1.7e9 + i + 0.4,
            "messages": [{"role": ("user", "assistant")[k % 2], "content": text} for k, text in enumerate(texts)],
            "response": {"choices": [{"finish_reason": "stop"}]},
            "prompt_tokens": sum(map(len, texts)) // 4, "completion_tokens": 9,
            "metadata": {"requester_metadata": {"session_id": session}} if session else {},
        }  # fmt: skip
        lines.append(json.dumps(entry) + "\n")
    path.write_text("".join(lines))
    return str(path)


POOL_TOKENS = "6000"
"""Less than the tokens of the open sessions, as an option's text."""
PLAN_OPTIONS = (
    "--device-tokens", POOL_TOKENS, "--disks", "none", "--server", "page_size=64", "--ttl", "none",
    "--search", "dram_levels=1,checks=off", "--jobs", "1",
)  # fmt: skip


def test_a_log_becomes_advice_a_plan_and_a_start_that_is_not_refused(tmp_path, monkeypatch, capsys):
    pytest.importorskip("sglang")
    from sglang_canopy.doctor import command_line

    monkeypatch.chdir(tmp_path)
    log = write_litellm_log(tmp_path / "requests.log")
    options = ["--capacity-tokens", POOL_TOKENS, "--json-out", "advice.json", "--jobs", "1"]
    assert main(["advise", log, *options]) == 0
    advice = json.loads((tmp_path / "advice.json").read_text())
    assert advice["sample"]["requests"] == 2 * SESSION_COUNT * TURN_COUNT
    assert advice["decision"]["flag"] == "auto"
    start_flags = "--radix-eviction canopy-lru --canopy-whatif canopy-lru,wa,floor=off"
    printed = capsys.readouterr().out
    assert f"Start: sglang serve MODEL {start_flags}" in printed
    assert "restart with --radix-eviction auto" in printed
    assert main(["plan", log, *PLAN_OPTIONS, "--out", "plan.yaml", "--json-out", "plan.json"]) == 0
    assert "Policy: auto, as canopy advise finds" in capsys.readouterr().out
    rows = json.loads((tmp_path / "plan.json").read_text())["evaluated"]
    assert {row["policy"] for row in rows} == {"wa"}
    assert {row["write_policy"] for row in rows if row["dram_gib"]} == {"write_back"}
    assert read_config("plan.yaml")["radix-eviction"] == "auto"
    server_args = command_line.parse_options(["--model-path", "/none", "--config", "plan.yaml"])
    assert server_args.radix_eviction_policy == "auto"
    assert not command_line.refusal_findings(server_args)
