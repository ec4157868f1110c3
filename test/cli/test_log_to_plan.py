"""Logs of other programs, all the way: advice, a plan, and a server's own check of it."""

import datetime
import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from canopy_lab.cli.main import main
from canopy_lab.plan.server_plan import read_config

SESSIONS, TURNS = 16, 6
START = datetime.datetime(2026, 3, 1, 9, 0, tzinfo=datetime.UTC)


def _asked() -> Iterator[tuple[int, str | None, list[str]]]:
    """Yield (second, session, messages so far). A single prompt has no session."""
    for at in range(2 * SESSIONS * TURNS):
        if at % 2:
            yield at, None, [f"scan {at} of a long file " * 120]
        else:
            talk, turn = at // 2 % SESSIONS, at // 2 // SESSIONS
            yield at, f"s{talk}", [f"session {talk} step {k} " * 40 for k in range(turn + 1)]


def _messages(texts: list[str]) -> list[dict[str, str]]:
    return [{"role": ("user", "assistant")[k % 2], "content": text} for k, text in enumerate(texts)]


def agents(path: Path) -> Path:
    """A gateway's own lines, with sessions."""
    rows = (
        {"time": START.timestamp() + at, "messages": _messages(texts), "completion_tokens": 9}
        | ({} if session is None else {"session_id": session})
        for at, session, texts in _asked()
    )
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def litellm(path: Path) -> Path:
    """LiteLLM's ``StandardLoggingPayload``."""
    rows = (
        {
            "id": f"chatcmpl-{at}",
            "call_type": "acompletion",
            "status": "success",
            "startTime": START.timestamp() + at,
            "endTime": START.timestamp() + at + 0.4,
            "model": "m",
            "messages": _messages(texts),
            "response": {"choices": [{"finish_reason": "stop"}]},
            "prompt_tokens": sum(map(len, texts)) // 4,
            "completion_tokens": 9,
            "metadata": {} if session is None else {"requester_metadata": {"session_id": session}},
        }
        for at, session, texts in _asked()
    )
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def vllm(path: Path) -> Path:
    """vLLM's ``--enable-log-requests``, which names no sessions."""
    lines = []
    for at, _, texts in _asked():
        when = (START + datetime.timedelta(seconds=at)).strftime("%m-%d %H:%M:%S")
        lines.append(
            f"INFO {when} [logger.py:41] Received request cmpl-{at}: prompt: {''.join(texts)!r}, "
            "params: SamplingParams(n=1, stop=[]), prompt_token_ids: None, lora_request: None.\n"
        )
    path.write_text("".join(lines))
    return path


WRITERS: dict[str, Callable[[Path], Path]] = {"agents": agents, "litellm": litellm, "vllm": vllm}


POOL = "6000"
"""Tokens: less than the open sessions have."""
PLAN = (
    "--device-tokens", POOL, "--disks", "none", "--server", "page_size=64", "--ttl", "none",
    "--search", "dram_levels=1,checks=off", "--jobs", "1",
)  # fmt: skip


@pytest.mark.parametrize(
    "program",
    [
        "litellm",
        *(pytest.param(name, marks=pytest.mark.long) for name in WRITERS if name != "litellm"),
    ],
)
def test_a_log_becomes_advice_a_plan_and_a_start_that_is_not_refused(
    program, tmp_path, monkeypatch, capsys
):
    pytest.importorskip("sglang")
    from sglang_canopy.doctor import command_line

    monkeypatch.chdir(tmp_path)
    log = str(WRITERS[program](tmp_path / "requests.log"))
    asked = ["--capacity-tokens", POOL, "--json-out", "advice.json", "--jobs", "1"]
    assert main(["advise", log, *asked]) == 0
    advice = json.loads((tmp_path / "advice.json").read_text())
    assert advice["sample"]["requests"] == 2 * SESSIONS * TURNS
    assert advice["decision"]["flag"] == "auto"
    start = "--radix-eviction canopy-lru --canopy-whatif auto,floor=off"
    printed = capsys.readouterr().out
    assert f"Start: sglang serve MODEL {start}" in printed
    assert "restart with --radix-eviction auto" in printed
    assert main(["plan", log, *PLAN, "--out", "plan.yaml", "--json-out", "plan.json"]) == 0
    assert "Policy: auto, as canopy advise finds" in capsys.readouterr().out
    rows = json.loads((tmp_path / "plan.json").read_text())["evaluated"]
    assert {row["policy"] for row in rows} == {"wa"}
    assert {row["write_policy"] for row in rows if row["dram_gib"]} == {"write_back"}
    assert read_config("plan.yaml")["radix-eviction"] == "auto"
    given = command_line.parse(["--model-path", "/none", "--config", "plan.yaml"])
    assert given.radix_eviction_policy == "auto"
    assert not command_line.refused(given)
