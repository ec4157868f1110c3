"""No request is overtaken for longer than its bound if running requests or KV are limited.

The test computes each request's work from what the simulated server did, not from the queue's accounts.
"""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from latency import overtaking
from sglang_canopy.schedule.bounded_shortest import BASE_BUDGET_S, COST_FACTOR, BoundedShortest
from sglang_canopy.schedule.cost import MIN_ANSWERS, AnswerCost, Prefill, PrefillCost, ServerCost
from sglang_canopy.tenant import Vouched

ROUNDING_S = 1e-6


def make_server_cost(max_running: int, step_s: float, pool_tokens: int = 1 << 20) -> ServerCost:
    prefill, answers = PrefillCost(256), AnswerCost(max_running, pool_tokens)
    prefill.adopt((0.0, 2e-4, 0.0, 0.0))
    answers.adopt(step_s)
    return ServerCost(prefill, answers)


def test_an_answer_takes_the_larger_of_its_shares_of_running_requests_and_of_kv() -> None:
    answers = AnswerCost(max_running=8, pool_tokens=1_000)
    assert answers.seconds(100, 50) == 0.0
    answers.adopt(0.02)
    assert answers.seconds(50, 50) == pytest.approx(50 * 0.02 / 8)
    assert answers.seconds(350, 50) == pytest.approx(50 * 0.02 * 0.4)
    assert answers.seconds(5_000, 50) == pytest.approx(50 * 0.02)


def test_an_answer_is_predicted_to_be_as_long_as_finished_ones() -> None:
    answers = AnswerCost(max_running=1, pool_tokens=1 << 20)
    for _ in range(MIN_ANSWERS - 1):
        answers.record_answer(4_096, 1_024)
    answers.adopt(0.01)
    assert answers.used_share == 1.0
    answers.record_answer(4_096, 1_024)
    assert answers.used_share == 1.0  # until ranks adopt the next fit together
    answers.adopt(0.01)
    assert answers.seconds(10, 400) == pytest.approx(1.0)


def test_a_long_prompt_is_overtaken_for_its_budget_where_one_request_runs_at_a_time() -> None:
    """Short prompts have answers of a second, which a bound on prefill alone would omit."""
    queue = BoundedShortest(make_server_cost(max_running=1, step_s=1 / 60))
    long_request, now_s = queue.add(Prefill(900, reserved=60)), 0.0
    queue.add(Prefill(40, reserved=60))
    while (first := queue.in_order()[0]) is not long_request:
        queue.admit([first])
        now_s += 1.0
        queue.add(Prefill(40, reserved=60))
        queue.set_time(now_s)
    assert 5.0 < now_s <= COST_FACTOR * long_request.cost_s + BASE_BUDGET_S + 1.0


def test_the_oldest_is_overtaken_by_the_clock_for_its_budget_if_answers_are_longer_than_predicted():
    queue = BoundedShortest(make_server_cost(max_running=8, step_s=0.0))
    long_request, now_s = queue.add(Prefill(900)), 0.0
    queue.set_time(now_s)
    queue.add(Prefill(40))
    while (first := queue.in_order()[0]) is not long_request:
        queue.admit([first])
        now_s += 1.0
        queue.add(Prefill(40))
        queue.set_time(now_s)
    assert 3.0 < now_s <= COST_FACTOR * long_request.cost_s + BASE_BUDGET_S + 1.0


def test_tenants_share_the_seconds_of_running_requests() -> None:
    queue = BoundedShortest(make_server_cost(max_running=1, step_s=0.01))
    served_requests = {"short": 0, "long": 0}
    for name, answer_tokens in (("short", 100), ("long", 1_000)):
        for _ in range(300):
            queue.add(Prefill(10, reserved=answer_tokens), Vouched(name), request=name)
    for _ in range(220):
        (first,) = queue.in_order()[:1]
        queue.admit([first])
        served_requests[first.request] += 1
    assert served_requests == {"short": 200, "long": 20}


@settings(max_examples=settings.default.max_examples // 2)
@given(
    max_running=st.integers(1, 6),
    pool_tokens=st.sampled_from([700, 1_500, 1 << 16]),
    max_answer_tokens=st.sampled_from([3, 30, 200]),
    is_predicted=st.booleans(),
    rng=st.randoms(use_true_random=False),
)
def test_no_request_is_overtaken_beyond_its_bound(
    max_running, pool_tokens, max_answer_tokens, is_predicted, rng
):
    """There are more clients than running requests, so the queue never empties. ``is_predicted``: whether the length of
    answers is known; if not, they are longer, and the bound of the clock alone holds."""
    server = overtaking.QueuingServer(overtaking.first_come, max_running, pool_tokens)
    bounded_order = overtaking.BoundedOrder(server)
    bounded_order.adopts_answers = False

    def send_request() -> None:
        answer_tokens = rng.randint(1, max_answer_tokens)
        reserved_tokens = answer_tokens if is_predicted else 1
        tokens = (rng.choice([10, 20, 400]), answer_tokens, reserved_tokens)
        server.waiting.append(overtaking.QueuedRequest(*tokens, server.now_s))

    def work_s(request: overtaking.QueuedRequest) -> float:
        kv_fraction = (request.prompt_tokens + request.answer_tokens) / pool_tokens
        share = min(1.0, max(1 / max_running, kv_fraction))
        answer_s = request.answer_tokens * server.decode_step_s * share
        return request.prompt_tokens * server.prefill_token_s + answer_s

    for _ in range(max_running + rng.randint(2, 12)):
        send_request()
    budgets_s = {}
    for _ in range(300):
        new_requests = [request for request in server.waiting if request not in budgets_s]
        budgets_s |= {request: bounded_order.budget_s(request) for request in new_requests}
        for _ in server.step():
            send_request()
    by_arrival = sorted(budgets_s, key=lambda request: request.arrival_s)
    arrival_position = {request: position for position, request in enumerate(by_arrival)}
    for request in by_arrival:
        later_requests = [
            later
            for later in server.admitted
            if arrival_position[later] > arrival_position[request]
            and later.admitted_s < request.admitted_s
        ]
        if is_predicted:
            assert sum(map(work_s, later_requests)) <= budgets_s[request] + ROUNDING_S
        for later in later_requests:
            assert later.admitted_s - request.oldest_since_s <= budgets_s[request] + ROUNDING_S
