"""Early refusal: its bound is kept as often as stated, and equal calls make equal decisions."""

import random

import pytest

from sglang_canopy.schedule.early_refusal import MAX_RETRY_S, EarlyRefusal
from sglang_canopy.schedule.predicted_ttft import WorkBefore
from sglang_canopy.schedule.ttft_bound import MIN_RATIOS, RATIOS, TtftBound

LIMIT_S = 5.0


def work(cost_s: float, before_s: float = 0.0) -> WorkBefore:
    return WorkBefore(cost_s, before_s, 0.0)


@pytest.mark.parametrize("quantile", [0.5, 0.9])
def test_the_stated_share_of_ttfts_is_within_the_bound_for_short_and_long_waits(quantile) -> None:
    bound, draw = TtftBound(quantile), random.Random(4)
    kept: dict[float, list[bool]] = {0.1: [], 20.0: []}
    for _ in range(4000):
        predicted = draw.choice(list(kept))
        # A short wait has a fixed cost that the prediction lacks.
        ttft = predicted * draw.lognormvariate(0.2, 0.8) + 0.3
        bound_s = bound.seconds(predicted)
        if bound_s != predicted:
            kept[predicted].append(ttft <= bound_s)
        bound.observed(predicted, bound_s, ttft)
        bound.adopt(bound.measured())
    for seen in kept.values():
        assert sum(seen) / len(seen) == pytest.approx(quantile, abs=0.03)
    assert bound.covered / bound.requests == pytest.approx(quantile, abs=0.03)


def test_no_factor_is_used_before_enough_ratios_and_the_next_window_below_lends_its_own() -> None:
    bound = TtftBound()
    for number in range(MIN_RATIOS):
        bound.adopt(bound.measured())
        assert bound.seconds(1.5) == 1.5, number
        bound.observed(1.5, 1.5, 3.0)
    bound.adopt(bound.measured())
    assert bound.seconds(1.5) == 3.0
    assert bound.seconds(40.0) == 80.0
    assert bound.seconds(0.01) == 0.02


def test_old_ratios_leave() -> None:
    bound = TtftBound()
    for ratio in [100.0] * RATIOS + [2.0] * RATIOS:
        bound.observed(1.5, 1.5, 1.5 * ratio)
    bound.adopt(bound.measured())
    assert bound.seconds(1.5) == 3.0


@pytest.mark.parametrize("predicted_s", [1e-6, 1e18])
def test_a_prediction_of_any_size_has_a_bound(predicted_s) -> None:
    bound = TtftBound()
    for _ in range(MIN_RATIOS):
        bound.observed(predicted_s, predicted_s, 1.0)
    bound.adopt(bound.measured())
    assert bound.seconds(predicted_s) == pytest.approx(1.0)


def test_the_work_ahead_and_the_request_itself_must_fit_into_the_limit() -> None:
    refusal = EarlyRefusal(LIMIT_S)
    assert not refusal.decide(work(1.0, 3.9), 3).refused
    assert refusal.decide(work(1.0, 4.1), 3).refused
    assert refusal.refused == 1


def test_a_bound_that_has_become_too_large_cannot_refuse_every_request() -> None:
    refusal = EarlyRefusal(LIMIT_S)
    for _ in range(MIN_RATIOS):
        refusal.bound.observed(1.0, 1.0, 1000.0)
    refusal.bound.adopt(refusal.bound.measured())
    assert refusal.decide(work(1.0), 1).refused
    assert not refusal.decide(work(1.0), 0).refused
    assert refusal.decide(work(6.0), 0).refused, "its own prefill exceeds the limit"


def test_retry_after_is_the_excess_over_the_limit() -> None:
    refusal = EarlyRefusal(LIMIT_S)
    assert refusal.retry_after_s(refusal.decide(work(5.1), 0)) == 1
    assert refusal.retry_after_s(refusal.decide(work(25.0), 0)) == 20
    assert refusal.retry_after_s(refusal.decide(work(1e9), 0)) == MAX_RETRY_S


def test_ranks_with_different_times_decide_the_same() -> None:
    ranks, draw = [EarlyRefusal(LIMIT_S), EarlyRefusal(LIMIT_S)], random.Random(1)
    for number in range(400):
        asked = work(draw.expovariate(1.0), draw.expovariate(0.5))
        first, second = (rank.decide(asked, number % 3) for rank in ranks)
        assert first == second
        for rank, slower in zip(ranks, (1.0, 7.0), strict=True):
            rank.bound.load.arrived(asked.cost_s, float(number))
            rank.bound.observed(first.predicted_s, first.bound_s, slower * draw.random())
        if number % 32 == 0:
            factors = ranks[0].bound.measured()
            for rank in ranks:
                rank.bound.adopt(factors)
    assert 0 < ranks[0].refused == ranks[1].refused
