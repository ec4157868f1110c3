"""The prefill budget is charged with what is computed."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

pytest.importorskip("torch")

from canopy_chunks.server import scheduler


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
def make(monkeypatch):
    """``make(room, spans)``: an adder whose prompts reuse a share of these spans, at ratio 0.2."""

    def made(room: int | None, *spans: tuple[int, int]):
        found = scheduler.ExpectedReuse(spans, 0.2)
        monkeypatch.setattr(scheduler, "expected_reuse", lambda engine, req: found)
        kind = scheduler.prefill_adder_class(Stock)
        monkeypatch.setattr(kind, "canopy_engine", object())
        return kind(room)

    return made


def test_a_fused_prompt_fills_only_its_share_of_a_window(make) -> None:
    adder = make(100, (10, 110))
    assert adder.add_one_req(request(120)) == "yes"
    assert adder.can_run_list[0].extend_end == 120
    assert adder.rem_chunk_tokens == adder.rem_input_tokens == 60
    assert adder.add_one_req(request(190, prefix=140)) == "yes"  # behind the span: nothing saved
    assert adder.rem_chunk_tokens == 10


def test_a_rejected_prompt_leaves_the_budget_as_it_was(make) -> None:
    adder = make(100, (10, 110))
    assert adder.add_one_req(request(120), True) == "no"
    assert adder.rem_chunk_tokens == adder.rem_input_tokens == 100


def test_a_prompt_longer_than_a_window_is_cut_where_its_computed_tokens_fill_it(make) -> None:
    adder = make(100, (300, 600))
    assert adder.add_one_req(request(700)) == "yes"
    assert adder.can_run_list[0].extend_end == 100  # the known documents are behind the window
    adder = make(100, (50, 550))
    assert adder.add_one_req(request(700)) == "yes"
    end = adder.can_run_list[0].extend_end
    assert 290 <= end <= 304  # 50 tokens, and a fifth of 250
    assert adder.rem_chunk_tokens >= 0


def test_what_another_limit_kept_out_of_a_window_gives_its_savings_back(make) -> None:
    adder = make(100, (0, 400))
    stock = Stock.add_one_req

    def short(self, req, *_):  # the pool has room for 50 tokens
        cut = request(50, 0)
        stock(self, cut)
        req.extend_end = 50
        return "yes"

    class Short(Stock):
        add_one_req = short

    kind = scheduler.prefill_adder_class(Short)
    kind.canopy_engine = object()
    adder = kind(100)
    adder.add_one_req(request(400))
    assert adder.rem_chunk_tokens == 100 - 50 + 40


def test_without_chunked_prefill_all_savings_count() -> None:
    assert scheduler.ExpectedReuse(((0, 100),), 0.15).credit(0, 120, None) == 85
    assert scheduler.ExpectedReuse(((0, 100),), 0.15).credit(40, 120, None) == 51
