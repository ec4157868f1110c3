"""The gate names what is missed; the prefill budget is charged with what is computed."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

pytest.importorskip("torch")

from sglang_canopy.chunk.server import budget
from sglang_canopy.chunk.server.gate import refusals

GOOD = {"kl": 0.1, "top1": 0.9, "kept": 0.8}


def test_figures_within_the_floors_pass() -> None:
    assert refusals(GOOD, 0.1, 0.9, 0.8) == []
    assert refusals(GOOD, None, None, None) == []


@pytest.mark.parametrize(
    ("floors", "flag"),
    [
        ((0.05, None, None), "--canopy-chunk-max-kl"),
        ((None, 0.95, None), "--canopy-chunk-min-top1"),
        ((None, None, 0.9), "--canopy-chunk-min-kept"),
    ],
)
def test_a_missed_floor_is_named_with_the_figure(floors, flag) -> None:
    (reason,) = refusals(GOOD, *floors)
    assert flag in reason


def test_a_model_that_answers_nothing_misses_the_floor_of_kept_answers() -> None:
    (reason,) = refusals({**GOOD, "kept": None}, None, None, 0.5)
    assert "no answer is right" in reason


class Stock:
    """As much of SGLang's adder as the budget touches: one window of ``rem_chunk_tokens``."""

    def __init__(self, room: int) -> None:
        self.rem_input_tokens = self.rem_chunk_tokens = room
        self.can_run_list: list = []

    def add_one_req(self, req, full=False):
        length = len(req.full_untruncated_fill_ids) - req.prefix_len
        take = min(length, self.rem_chunk_tokens)
        if full or take <= 0:
            return "no"
        req.extend_end = req.prefix_len + take
        self.can_run_list.append(req)
        self.rem_chunk_tokens -= take
        self.rem_input_tokens -= take
        return "yes"


def request(length: int, prefix: int = 0):
    return SimpleNamespace(
        full_untruncated_fill_ids=[0] * length, prefix_len=prefix, extend_end=prefix
    )


@pytest.fixture
def adder(monkeypatch):
    monkeypatch.setattr(budget, "saving", lambda engine, req: 80 if req.prefix_len == 0 else 0)
    made = budget.adder_class(Stock)
    monkeypatch.setattr(made, "canopy_engine", object())
    return made(100)


def test_a_fused_prompt_fills_only_its_share_of_a_window(adder) -> None:
    assert adder.add_one_req(request(120)) == "yes"
    assert adder.can_run_list[0].extend_end == 120
    assert adder.rem_chunk_tokens == adder.rem_input_tokens == 60
    assert adder.add_one_req(request(90, prefix=40)) == "yes"
    assert adder.rem_chunk_tokens == 10


def test_a_rejected_prompt_leaves_the_budget_as_it_was(adder) -> None:
    assert adder.add_one_req(request(120), True) == "no"
    assert adder.rem_chunk_tokens == adder.rem_input_tokens == 100
