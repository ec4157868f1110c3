"""The quick start's agents and readers: their requests, and the report."""

import argparse
import contextlib
import itertools
import random
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import agents
import quickstart
from environment import ROOT, SetupError
from support.chat_endpoint import chat_endpoint

TEXTS = ["".join(f"{name}{i} " for i in range(5000)) for name in "abc"]


def test_each_turn_continues_the_previous_one() -> None:
    prompts = []
    for messages in agents.task_prompts(TEXTS, random.Random(1)):
        prompts.append([*messages])
        messages.append({"role": "assistant", "content": "ls"})
    assert agents.MIN_TURNS <= len(prompts) <= agents.MAX_TURNS
    for before, after in itertools.pairwise(prompts):
        assert after[: len(before)] == before
        assert [message["role"] for message in after[len(before) :]] == ["assistant", "user"]
    assert prompts[0][0] == {"role": "system", "content": agents.SYSTEM_PROMPT}


def test_equal_seeds_send_equal_requests_and_others_differ() -> None:
    def opening(seed: int) -> str:
        return next(agents.task_prompts(TEXTS, random.Random(seed)))[1]["content"]

    assert opening(1) == opening(1) != opening(2)
    first, second = (agents.reader_prompt(TEXTS, random.Random(seed)) for seed in (1, 2))
    assert first != second


def test_texts_are_read_from_the_given_folders(tmp_path: Path) -> None:
    texts = agents.read_texts([ROOT / "docs", ROOT / "python"])
    assert sum(map(len, texts)) > 500_000
    with pytest.raises(SetupError, match="less than 20,000 characters"):
        agents.read_texts([tmp_path])
    (tmp_path / "transcript.jsonl").write_text("x" * 30_000)
    (tmp_path / "picture.png").write_bytes(b"y" * 30_000)
    assert agents.read_texts([tmp_path]) == ["x" * 30_000]


def test_steps_documents_and_hits_are_counted() -> None:
    turns = [
        agents.ClientTurn("agent", 1.0, 100, 50),
        agents.ClientTurn("agent", 3.0, 100, 100),
        agents.ClientTurn("reader", 9.0, 100, 0),
    ]
    outcome = agents.outcome_of(turns)
    assert (outcome.steps, outcome.documents, outcome.first_token_s) == (2, 1, 2.0)
    assert outcome.hit_ratio == pytest.approx(0.5)
    assert agents.outcome_of([]).hit_ratio == 0


def test_the_quick_start_runs_the_agents_on_each_server(monkeypatch, tmp_path, capsys) -> None:
    """The script's own steps; real servers are in test/served/test_plan.py."""
    pytest.importorskip("openai")
    requests_by_arm: dict[str, list[tuple[str, dict[str, Any]]]] = {}
    other_answers = {"/canopy/status": {"auto": "wa hits 40.0 %"}, "/flush_cache": {}}

    @contextlib.contextmanager
    def serve(model: Path, name: str, device_kind: str, arm: str, port: int) -> Iterator[Any]:
        with chat_endpoint([], other_answers) as (url, received):
            requests_by_arm[arm] = received.requests
            yield SimpleNamespace(url=url)

    monkeypatch.setattr(quickstart, "serve", serve)
    monkeypatch.setattr(quickstart, "STATE_FOLDER", tmp_path)
    monkeypatch.setattr(agents, "THINK_RANGE_S", (0.0, 0.1))
    monkeypatch.setattr(agents, "MEAN_READ_S", 0.1)
    monkeypatch.setattr(quickstart.webbrowser, "open", lambda url: None)
    args = argparse.Namespace(port=1, seconds=1.5, once=True)
    assert quickstart.compare(tmp_path, "m", "cpu", args, TEXTS) == 0
    assert [*requests_by_arm] == ["lru", "lru + host", "auto + host"]
    for (_, question), (flush_path, _), *chats in requests_by_arm.values():
        assert question["messages"][0]["content"] == quickstart.QUESTION
        assert flush_path.startswith("/flush_cache")
        # An agent's chat begins with its system prompt, a reader's with its question.
        assert {body["messages"][0]["role"] for _, body in chats} == {"system", "user"}
    printed = capsys.readouterr().out
    assert "auto + host against lru + host: " in printed
    assert "40 %" in printed  # four of ten prompt tokens
    assert "/canopy/ui" in printed
    assert "What auto did: wa hits 40.0 %" in printed
