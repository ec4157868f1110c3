"""Slices of agents' sessions, and the figures of their replays."""

import argparse
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from canopy_lab.trace import TraceRequest
from support.load_benchmarks import module

agents = module("agent_slices")


def trace(users: int, turns: int, tokens: int) -> list[TraceRequest]:
    """Sessions with interleaved turns, each turn ``tokens`` longer."""
    return [
        TraceRequest(
            time_s=float(turn * users + user),
            input_tokens=(turn + 1) * tokens,
            output_tokens=64,
            blocks=tuple(user * 1000 + i for i in range((turn + 1) * tokens // 64)),
            block_tokens=64,
            conversation=f"c{user}",
            user=f"u{user}",
        )
        for turn in range(turns)
        for user in range(users)
    ]


def options(**given: Any) -> argparse.Namespace:
    set_up = {"slices": 2, "sessions": 3, "turns": 6, "context": 600, "rate": 3600.0, "seed": 1}
    rest = {
        "think_cap": 20.0,
        "think_scale": 0.05,
        "vocab_size": 1 << 15,
        "data": Path(),
        "users": [],
    }
    return argparse.Namespace(**{**set_up, **rest, "scale_lengths": Fraction(1, 64), **given})


@pytest.fixture(autouse=True)
def archive(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agents, "overlay", lambda *_, **__: trace(12, 8, 6400))


def test_a_slice_is_of_whole_sessions_and_no_session_is_in_two() -> None:
    made, parts = agents.plan(options())
    assert [len({p.request.user for p in part}) for part in parts] == [3, 3, 3]
    assert len({p.request.user for part in parts for p in part}) == 9
    # 6,400 tokens a turn, scaled 100: the sixth turn is the last that 600 would hold, but its
    # answer's token is beyond.
    assert {len(part) for part in parts} == {3 * 5}
    assert all(p.prompt_tokens + p.output_tokens <= 600 for p in made.planned)


def test_too_few_sessions_end_it_with_both_numbers() -> None:
    with pytest.raises(SystemExit, match="15 sessions are wanted, 12 fit"):
        agents.plan(options(slices=4))


def one(seconds: float, ttft: list[float]) -> dict[str, Any]:
    count = len(ttft)
    return {
        "seconds": seconds,
        "ttft_s": ttft,
        "done_s": [float(i + 2) for i in range(count)],
        "due_s": [float(i) for i in range(count)],
        "cached_tokens": [50] * count,
        "prompt_tokens": [100] * count,
        "first": [0, 0, 2, 2][:count],
    }


def test_figures_by_hand() -> None:
    seconds, mean, p99, session, hits = agents.figures([one(10.0, [1.0, 2.0, 3.0, 6.0])])
    assert (seconds, mean, hits) == (10.0, 3.0, 0.5)
    assert p99 == pytest.approx(5.91)
    # Sessions of requests 0, 1 and 2, 3: due at 0 and 2, answered at 3 and 5.
    assert session == 3.0


def test_a_table_of_two_arms_takes_as_many_slices_of_both() -> None:
    base = [one(10.0, [1.0, 1.0, 1.0, 1.0])] * 3
    other = [one(5.0, [0.5, 0.5, 0.5, 0.5])] * 2
    lines = list(agents.table({"slices": {"lru": base, "gate": other}}))
    assert lines[0].startswith("2 slices, 8 requests an arm")
    assert "| lru | 20.00 | 1.00 |" in lines[-2]
    assert "10.00 (-50 [-50, -50]) | 0.50 (-50 [-50, -50])" in lines[-1]
    assert not list(agents.table({"slices": {"lru": base, "gate": []}}))
