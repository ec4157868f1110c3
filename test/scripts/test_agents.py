"""The quick start's agents and readers: what they send, and what is said of it."""

from __future__ import annotations

import itertools
import random
from pathlib import Path

import pytest

import agents
from environment import ROOT, SetupError

TEXTS = ["".join(f"{name}{n} " for n in range(5000)) for name in "abc"]


def test_each_turn_goes_on_from_the_one_before() -> None:
    sent = []
    for messages in agents.task(TEXTS, random.Random(1)):
        sent.append([*messages])
        messages.append({"role": "assistant", "content": "ls"})
    assert agents.LEAST_TURNS <= len(sent) <= agents.MOST_TURNS
    for before, after in itertools.pairwise(sent):
        assert after[: len(before)] == before
        assert [m["role"] for m in after[len(before) :]] == ["assistant", "user"]
    assert sent[0][0] == {"role": "system", "content": agents.SYSTEM}


def test_who_draws_with_the_same_seed_sends_the_same_and_another_something_else() -> None:
    def opening(seed: int) -> str:
        return next(agents.task(TEXTS, random.Random(seed)))[1]["content"]

    assert opening(1) == opening(1) != opening(2)
    assert agents.question(TEXTS, random.Random(1)) != agents.question(TEXTS, random.Random(2))


def test_texts_are_those_of_the_checkout_or_of_a_folder(tmp_path: Path) -> None:
    own = agents.read_texts([ROOT / "docs", ROOT / "python"])
    assert sum(map(len, own)) > 500_000
    with pytest.raises(SetupError, match="less than 20,000 characters"):
        agents.read_texts([tmp_path])
    (tmp_path / "transcript.jsonl").write_text("x" * 30_000)
    (tmp_path / "picture.png").write_bytes(b"y" * 30_000)
    assert agents.read_texts([tmp_path]) == ["x" * 30_000]


def test_what_is_counted() -> None:
    answers = [
        agents.Answer("agent", 1.0, 100, 50),
        agents.Answer("agent", 3.0, 100, 100),
        agents.Answer("reader", 9.0, 100, 0),
    ]
    found = agents.outcome(answers)
    assert (found.steps, found.documents, found.first_token_s) == (2, 1, 2.0)
    assert found.hit_ratio == pytest.approx(0.5)
    assert agents.outcome([]).hit_ratio == 0


@pytest.mark.parametrize(("steps", "said"), [(15, "50 % more"), (5, "50 % less"), (10, "0 % more")])
def test_the_table_says_what_came_out_whichever_is_ahead(steps: int, said: str) -> None:
    one = agents.Outcome(10, 5, 2.5, 0.4)
    text = agents.side_by_side({"lru": one, "wa": agents.Outcome(steps, 5, 2.0, 0.6)}, 60)
    assert f"got {said} done under wa than under lru" in text
    assert "2.5 s" in text
    assert "60 %" in text
