"""Agents at the cliff, served: what is sent, when, and what is made of the answers."""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from fractions import Fraction
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from canopy_lab.trace import TraceRequest

FOLDER = Path(__file__).parents[2] / "benchmark" / "latency"


def module(name: str) -> ModuleType:
    sys.path.insert(0, str(FOLDER))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(str(FOLDER))


gate = module("served_gate")


def trace(users: int, turns: int, tokens: int) -> list[TraceRequest]:
    """Sessions whose turns come in between those of the others, each turn ``tokens`` longer."""
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
    rest = {"think_cap": 20.0, "think_scale": 0.05, "vocab_size": 1 << 15, "data": Path()}
    return argparse.Namespace(**{**set_up, **rest, "scale_lengths": Fraction(1, 64), **given})


@pytest.fixture(autouse=True)
def archive(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gate, "overlay", lambda *_, **__: trace(12, 8, 6400))


def test_a_slice_is_of_whole_sessions_and_no_session_is_in_two() -> None:
    made, parts = gate.plan(options())
    assert [len({p.request.user for p in part}) for part in parts] == [3, 3, 3]
    assert len({p.request.user for part in parts for p in part}) == 9
    # 6,400 tokens a turn, scaled 100: the sixth turn is the last that 600 would hold, but its
    # answer's token is beyond.
    assert {len(part) for part in parts} == {3 * 5}
    assert all(p.prompt_tokens + p.output_tokens <= 600 for p in made.planned)


def test_too_few_sessions_end_it_with_both_numbers() -> None:
    with pytest.raises(SystemExit, match="15 sessions are wanted, 12 fit"):
        gate.plan(options(slices=4))


def test_simulated_sessions_begin_as_the_served_ones_do_and_a_turn_waits_for_the_answer() -> None:
    args = options()
    _, parts = gate.plan(args)
    arrivals = gate.Sliced(args, parts)
    begun = arrivals.begin()
    assert [i for _, i in begun if i < len(parts[0])] == [0, 1, 2]
    for number, part in enumerate(parts):
        links = gate.links_of(args, part)
        offsets = gate.session_offsets_s(links, args.rate, number)
        first = sum(map(len, parts[:number]))
        for i, before in enumerate(links.before):
            if before < 0:
                assert (number * gate.APART_S + offsets[i], first + i) in begun
            else:
                # 12 s between two turns of the trace, a twentieth of it.
                assert (100.0 + links.think_s[i], first + i) in arrivals.answered(
                    first + before, 100.0
                )
                assert links.think_s[i] == pytest.approx(0.6)


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
    seconds, mean, p99, session, hits = gate.figures([one(10.0, [1.0, 2.0, 3.0, 6.0])])
    assert (seconds, mean, hits) == (10.0, 3.0, 0.5)
    assert p99 == pytest.approx(5.91)
    # Sessions of requests 0, 1 and 2, 3: due at 0 and 2, answered at 3 and 5.
    assert session == 3.0


def test_a_table_of_two_arms_takes_as_many_slices_of_both() -> None:
    base = [one(10.0, [1.0, 1.0, 1.0, 1.0])] * 3
    other = [one(5.0, [0.5, 0.5, 0.5, 0.5])] * 2
    lines = list(gate.table({"slices": {"lru": base, "gate": other}}))
    assert lines[0].startswith("2 slices, 8 requests an arm")
    assert "| lru | 20.00 | 1.00 |" in lines[-2]
    assert "10.00 (-50 [-50, -50]) | 0.50 (-50 [-50, -50])" in lines[-1]
    assert not list(gate.table({"slices": {"lru": base, "gate": []}}))


def test_a_result_goes_on_only_with_its_own_arguments(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "served-gate.json"
    path.write_text(json.dumps({"about": {"arms": {}}, "slices": {"lru": []}}))
    argv = ["served_gate.py", "--data", str(tmp_path), "--model", str(tmp_path), "--arm", "lru="]
    monkeypatch.setattr(sys, "argv", [*argv, "--out", str(tmp_path)])
    with pytest.raises(SystemExit, match="other arguments"):
        gate.main()


@pytest.mark.parametrize("text", ["cap", "cap=0", "cap=x", "=4"])
def test_a_cap_needs_a_name_and_a_number(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="must be NAME=K"):
        gate._cap(text)
