"""Predicted TTFT of an arriving request: work before it, later work, and learnt errors."""

import pytest

from sglang_canopy.schedule.bounded_shortest import BoundedShortest
from sglang_canopy.schedule.predicted_ttft import (
    FADE_S,
    LEARNT_FROM,
    MIN_OBSERVED,
    PredictedTtft,
    WorkBefore,
)
from sglang_canopy.schedule.prefill_cost import Prefill, PrefillCost


def queue(factor: float = 1.0, own: float = 10.0, least_s: float = 2.0) -> BoundedShortest:
    """Return a queue in which a token costs a second."""
    cost = PrefillCost()
    cost.adopt((0.0, 1.0, 0.0, 0.0))
    return BoundedShortest(cost, factor, own, least_s)


def test_alone_it_takes_its_own_prefill() -> None:
    line = queue()
    assert PredictedTtft().seconds(line.work_before(line.add(Prefill(7)))) == 7.0
    assert PredictedTtft().seconds(queue().work_before_new(7.0)) == 7.0


def test_a_request_of_any_cost_is_predicted() -> None:
    for cost_s in (0.0, 1e-12, 1e6, 1e18):
        predicted = PredictedTtft()
        predicted.arrived(cost_s, 1.0)
        assert predicted.seconds(WorkBefore(cost_s, 0.0, 0.0)) == cost_s


def test_shorter_requests_are_ahead_and_longer_ones_are_not() -> None:
    line = queue()
    for tokens in (3, 50, 5):
        line.add(Prefill(tokens))
    assert line.work_before(line.add(Prefill(10))).before_s == 8.0
    assert line.work_before_new(10.0).before_s == 18.0


def test_an_older_request_without_budget_is_ahead() -> None:
    line = queue(factor=1.0, own=0.0, least_s=2.0)
    line.add(Prefill(50))
    assert line.work_before(line.add(Prefill(10))).before_s == 50.0
    assert line.work_before(line.add(Prefill(1))).before_s == 0.0


def test_each_other_tenants_turn_takes_as_long_as_ones_own() -> None:
    line = queue()
    for name in ("a", "b"):
        line.admit([line.add(Prefill(1), name)])
    for tokens in (4, 90):
        line.add(Prefill(tokens), "a")
    assert line.work_before(line.add(Prefill(20), "b")).before_s == 20.0
    line.add(Prefill(3), "a", urgency=1)
    assert line.work_before(line.add(Prefill(5), "b")).before_s == 8.0


def test_a_running_chunked_prompt_is_ahead_or_shares_steps() -> None:
    line = queue()
    long = line.add(Prefill(200))
    line.admit([long])
    line.chunked(long, 100.0)
    assert line.work_before(line.add(Prefill(150))).before_s == 100.0
    assert line.work_before(line.add(Prefill(10))).before_s == 10.0


def test_later_shorter_requests_count_up_to_the_budget() -> None:
    model, ahead = PredictedTtft(), WorkBefore(cost_s=10.0, before_s=30.0, budget_s=20.0)
    assert model.seconds(ahead) == 40.0
    for second in range(1, 600):
        model.arrived(0.25, float(second))
    assert model.seconds(ahead) == pytest.approx(10.0 + 30.0 / (1.0 - 0.25), rel=0.02)
    assert model.seconds(WorkBefore(0.1, 30.0, 20.0)) == pytest.approx(
        30.1
    )  # no request is shorter
    for tenth in range(6000, 9000):
        model.arrived(0.2, tenth / 10)
    assert model.seconds(ahead) == 60.0
    model.arrived(1.0, 1000.0 + 20 * FADE_S)
    assert model.seconds(ahead) < 41.0


def test_engine_overhead_is_learnt_and_errors_are_summed() -> None:
    model, ahead = PredictedTtft(), WorkBefore(2.0, 2.0, 0.0)
    for _ in range(2 * LEARNT_FROM):
        model.first_token(ahead, model.seconds(ahead), 6.0)
    assert model.seconds(ahead) == pytest.approx(6.0)
    assert (model.requests, model.observed_s) == (2 * LEARNT_FROM, 12.0 * LEARNT_FROM)
    assert model.error_s == pytest.approx(2.0 * MIN_OBSERVED)  # of the first requests
    for number in range(LEARNT_FROM):
        one = WorkBefore(1.0 + number % 7, 0.0, 0.0)
        model.first_token(one, model.seconds(one), 0.5 + 3.0 * one.cost_s)
    assert model.seconds(WorkBefore(10.0, 0.0, 0.0)) == pytest.approx(30.5)
