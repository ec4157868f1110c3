"""Cost of a burst of arrivals for the predictions of TTFT, in counts of work."""

import random
from typing import Any

import pytest

from sglang_canopy.schedule.arranged import Arranged
from sglang_canopy.schedule.bounded_shortest import BoundedShortest
from sglang_canopy.schedule.predicted_ttft import FADE_S, WorkBefore
from sglang_canopy.schedule.prefill_cost import Prefill, PrefillCost
from sglang_canopy.server.scheduler.predictions import MAX_PREDICTED, Predictions


class Req:
    def __init__(self, tokens: int) -> None:
        self.tokens, self.output_ids = tokens, []
        self.path = [random.getrandbits(60) for _ in range(4)]


class Requests:
    def tenant(self, _request: Req) -> str | None:
        return None

    def urgency(self, _request: Req) -> int:
        return 0

    def prefill(self, request: Req, look_up: bool) -> Prefill:
        return Prefill(request.tokens)

    def path(self, request: Req) -> tuple[Any, int]:
        return request.path, 16

    def rest(self, request: Req) -> Prefill:
        return Prefill(request.tokens)

    def step_tokens_worth(self) -> float:
        return 100.0

    def step_tokens(self) -> int:
        return 8192


class CountingOrder(BoundedShortest):
    """Counts the queries for the work before a request. Each reads the whole queue."""

    queries = 0

    def work_before(self, waiting: Any) -> WorkBefore:
        self.queries += 1
        return super().work_before(waiting)


def burst(count: int, tight: bool) -> tuple[CountingOrder, Predictions, list[Req]]:
    """``count`` requests arrive while the running batch is full, and are then ordered at once."""
    draw, order = random.Random(1), CountingOrder(PrefillCost(8192))
    if tight:  # as in a long overload, budgets are nearly used up
        order.own, order.least_s = 0.001, 0.0
    arranged, predictions = Arranged(order, Requests()), Predictions(order)
    queue = [Req(draw.choice([200, 800, 3000, 12000, 60000])) for _ in range(count)]
    for req in queue:
        predictions.queued(req, 0.0)
    arranged.arrange(queue)
    predictions.arranged(arranged.entered, 1.0)
    return order, predictions, queue


@pytest.mark.parametrize("tight", [False, True])
def test_a_burst_is_predicted_from_a_bounded_number_of_its_requests(tight: bool) -> None:
    order, predictions, queue = burst(20 * MAX_PREDICTED, tight)
    assert order.queries == MAX_PREDICTED
    assert sum(predictions.of(req) is not None for req in queue) == MAX_PREDICTED
    assert len(predictions) == MAX_PREDICTED


def test_every_request_of_a_burst_counts_towards_the_load() -> None:
    order, predictions, queue = burst(MAX_PREDICTED + 8, tight=False)
    longest = WorkBefore(order.cost.seconds(Prefill(120_000)), 1.0, 1e9)
    arrived_s = sum(order.cost.seconds(Prefill(req.tokens)) for req in queue)
    load = arrived_s / FADE_S
    assert load < 0.99
    expected = 1.0 + load / (1.0 - load) + longest.cost_s
    assert predictions.model.seconds(longest) == pytest.approx(expected)
