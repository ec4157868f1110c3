"""The order of the queue: shortest first, no request overtaken by more than its budget, tenants in fair
shares."""

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_canopy.schedule import bounded_shortest
from sglang_canopy.schedule.bounded_shortest import COST_FACTOR, SORTED_HEAD, BoundedShortest
from sglang_canopy.schedule.cost import Prefill, PrefillCost
from sglang_canopy.schedule.cost_queue import BUDGET_HEAD, WaitingRequest
from sglang_canopy.schedule.fair_shares import SEPARATE_SHARES, FairShares
from support.bound_ledger import BoundLedger


def make_queue(cost_factor: float = 1.0, base_budget_s: float = 0.0) -> BoundedShortest:
    """Return a queue in which a token costs a second."""
    cost = PrefillCost()
    cost.adopt((0.0, 1.0, 0.0, 0.0))
    return BoundedShortest(cost, cost_factor, base_budget_s)


def serve(queue: BoundedShortest) -> WaitingRequest:
    """Admit the first request."""
    waiting = queue.in_order()[0]
    queue.admit([waiting])
    return waiting


@pytest.fixture
def queue():
    return make_queue()


def test_the_shortest_is_next_until_a_budget_is_used_up(queue) -> None:
    long_request = queue.add(Prefill(100))  # nothing is cached: a budget of 100
    short_requests = [queue.add(Prefill(40)) for _ in range(4)]
    assert [serve(queue) for _ in range(3)] == [*short_requests[:2], long_request]
    assert [serve(queue) for _ in range(2)] == short_requests[2:]
    assert queue.admission_counts == {"shortest": 4, "budget": 1}


def test_equal_requests_are_admitted_in_order_of_arrival(queue) -> None:
    requests = [queue.add(Prefill(10)) for _ in range(20)]
    assert queue.in_order() == requests


def test_no_budget_is_first_come_first_served() -> None:
    queue, rng = make_queue(0.0), random.Random(3)
    requests = [queue.add(Prefill(rng.randint(1, 50))) for _ in range(60)]
    assert queue.in_order() == requests


def test_an_infinite_factor_is_shortest_first() -> None:
    queue, rng = make_queue(math.inf), random.Random(3)
    requests = [queue.add(Prefill(rng.randint(1, 50))) for _ in range(60)]
    assert queue.in_order() == sorted(requests, key=lambda each: (each.cost_s, each.number))


def test_requests_with_cached_prefixes_move_up_and_first_while_a_full_pool_waits() -> None:
    queue = make_queue(math.inf)
    queue.unbacked_tokens = 200
    first, short_request, long_request = (queue.add(Prefill(tokens)) for tokens in (50, 20, 140))
    queue.update(long_request, Prefill(40, 100))
    assert queue.in_order() == [short_request, long_request, first]
    filler = queue.add(Prefill(91))
    assert queue.in_order() == [long_request, short_request, first, filler]
    queue.remove(first)  # half of the pool still waits
    assert queue.in_order() == [long_request, short_request, filler]
    queue.remove(filler)
    assert queue.in_order() == [short_request, long_request]


def test_a_retracted_request_keeps_its_place_and_remaining_budget(queue) -> None:
    first = queue.add(Prefill(100))
    queue.admit([queue.add(Prefill(70))])
    queue.admit([first])
    later = queue.add(Prefill(40))
    queue.requeue(first, Prefill(110))
    assert queue._queue_of(first).age_order.allowance(first.position) == 30.0
    assert queue.in_order() == [first, later]
    queue.admit([first, later])
    assert not queue.in_order()


def test_no_request_passes_a_chunked_prefill_without_budget(queue) -> None:
    long_request = queue.add(Prefill(100))
    short_requests = [queue.add(Prefill(60)) for _ in range(2)]
    queue.admit([long_request])
    queue.set_chunked_prompt(long_request)
    assert queue.over_budget(queue.in_order(), 1000) == short_requests[1:]
    assert queue.select(queue.in_order(), lambda _waiting: True) == short_requests[:1]
    queue.admit(short_requests[:1])
    assert queue.over_budget(queue.in_order(), 1000) == short_requests[1:]
    assert (
        queue._queue_of(short_requests[1]).age_order.allowance(short_requests[1].position) == 60.0
    )
    queue.reprice()  # no state is lost in a rebuild
    assert queue.over_budget(queue.in_order(), 1000) == short_requests[1:]
    queue.set_chunked_prompt(None)
    assert queue.over_budget(queue.in_order(), 1000) == []


def test_a_prefix_that_must_be_loaded_costs_more_than_a_resident_one() -> None:
    cost = PrefillCost()
    cost.adopt((0.0, 1e-3, 0.0, 1e-4))
    queue = BoundedShortest(cost)
    loaded = queue.add(Prefill(10, 1_000, 1_000))
    resident = queue.add(Prefill(10, 1_000))
    assert queue.in_order() == [resident, loaded]


def test_a_higher_priority_is_always_admitted_first(queue) -> None:
    low_priority = [queue.add(Prefill(1), urgency=0) for _ in range(5)]
    high_priority = [queue.add(Prefill(500), urgency=3) for _ in range(5)]
    in_order = queue.in_order()
    assert set(in_order[:5]) == set(high_priority)
    assert set(in_order[5:]) == set(low_priority)


def test_an_unserved_share_is_first_regardless_of_service() -> None:
    shares = FairShares()
    shares.charge("served", "served", 0.25)
    assert shares.starts(["served", "new"]) == {"served": 0.25, "new": 0.0}


def test_only_the_requests_that_the_tokens_of_a_step_reach_are_checked() -> None:
    queue = make_queue(0.0)
    oldest, overtaken, later = (queue.add(Prefill(tokens)) for tokens in (100, 40, 60))
    in_order = [oldest, later, overtaken]
    assert queue.over_budget(in_order, 100) == []
    assert queue.over_budget(in_order, 101) == [later]


@settings(max_examples=2 * settings.default.max_examples)
@given(st.sampled_from([0.0, 1.0, 10.0]), st.integers(1, 30), st.randoms(use_true_random=False))
def test_no_request_is_passed_beyond_the_bound(cost_factor, full_step_s, rng) -> None:
    """The engine has steps of ``full_step_s``, a chunked prompt, and others that share its steps. Requests
    arrive at up to three times the capacity, and some clients disconnect."""
    base_budget_s = 4.0
    queue = make_queue(cost_factor, base_budget_s)
    queue.unbacked_tokens = rng.choice([math.inf, 100])
    done_s, remaining_s, half_step_s = 0.0, 0.0, 0.0
    chunk: WaitingRequest | None = None
    latest_s: dict[int, float] = {}

    def fits_half_step(waiting: WaitingRequest) -> bool:
        nonlocal half_step_s
        has_room = waiting.cost_s <= half_step_s
        half_step_s -= waiting.cost_s * has_room
        return has_room

    for _ in range(rng.randint(10, 120)):
        queue.set_chunked_prompt(chunk)
        for _ in range(rng.randrange(4)):
            cost_s = rng.choice([1, 1, 2, 5, rng.randint(1, 80)])
            earlier_s = sum(waiting.cost_s for waiting in queue.in_order()) + remaining_s
            bound_s = earlier_s + (1 + cost_factor) * cost_s + base_budget_s
            cached_tokens = rng.choice([0, 0, rng.randrange(99)])
            number = queue.add(Prefill(cost_s, cached_tokens)).number
            latest_s[number] = done_s + bound_s + 1e-6
        if queue.in_order() and rng.random() < 0.1:
            queue.remove(rng.choice(queue.in_order()))
        step_s, half_step_s, in_order = float(full_step_s), full_step_s / 2, queue.in_order()
        if chunk is not None:
            for waiting in queue.select(in_order, fits_half_step):
                queue.admit([waiting])
                done_s, step_s = done_s + waiting.cost_s, step_s - waiting.cost_s
                assert done_s <= latest_s.pop(waiting.number)
            chunk_s = min(remaining_s, step_s)
            done_s, remaining_s = done_s + chunk_s, remaining_s - chunk_s
            if remaining_s <= 0:
                assert done_s <= latest_s.pop(chunk.number)
                chunk = None
            continue
        for waiting in in_order:
            if step_s <= 0:
                break
            queue.admit([waiting])
            run_s = min(waiting.cost_s, step_s)
            done_s, step_s, remaining_s = done_s + run_s, step_s - run_s, waiting.cost_s - run_s
            if remaining_s > 0:
                chunk = waiting
                break
            assert done_s <= latest_s.pop(waiting.number)


def serve_alone(choose, requests: list[tuple[float, int]]) -> list[float]:
    """Return the waits of ``requests`` (time, cost), served one at a time, as ``choose`` selects."""
    queue, waits_s, now = make_queue(COST_FACTOR, bounded_shortest.BASE_BUDGET_S), [], 0.0
    pending = list(reversed(requests))
    while pending or queue.in_order():
        if not queue.in_order():
            now = max(now, pending[-1][0])
        while pending and pending[-1][0] <= now:
            time, cost = pending.pop()
            queue.add(Prefill(cost), request=time)
        admitted = choose(queue)
        queue.admit([admitted])
        waits_s.append(now - admitted.request)
        now += admitted.cost_s
    return waits_s


@pytest.mark.parametrize("seed", range(3))
def test_at_150_percent_load_waits_are_shorter_than_first_come_first_served(seed: int) -> None:
    rng, requests, time = random.Random(seed), [], 0.0
    for _ in range(1_500):
        requests.append((time, max(1, min(3_000, int(rng.lognormvariate(3.5, 1.3))))))
        time += rng.expovariate(1.0) * 77 / 1.5  # the mean cost, at 1.5 times the capacity
    first_come_waits_s = serve_alone(lambda queue: queue.in_order(0)[0], requests)
    bounded_waits_s = serve_alone(lambda queue: queue.in_order(1)[0], requests)
    assert sum(bounded_waits_s) < 0.7 * sum(first_come_waits_s)
    assert max(bounded_waits_s) < 2.5 * max(first_come_waits_s)


@given(st.lists(st.integers(1, 50), min_size=2, max_size=6), st.randoms(use_true_random=False))
def test_tenants_with_work_get_equal_seconds(costs, rng) -> None:
    """Each tenant's requests cost its own; many cheap ones get no more than few expensive ones."""
    queue = make_queue()
    tenants = [f"t{i}" for i in range(len(costs))]
    served_s = dict.fromkeys(tenants, 0.0)

    def fill() -> None:
        for name, cost in zip(tenants, costs, strict=True):
            while sum(waiting.tenant == name for waiting in queue.in_order()) < 3:
                queue.add(Prefill(cost), name)

    for name, cost in zip(tenants, costs, strict=True):  # each once, unmeasured
        queue.add(Prefill(cost), name)
    while queue.in_order():
        serve(queue)
    for _ in range(rng.randint(100, 300)):
        fill()
        admitted = serve(queue)
        served_s[admitted.tenant] += admitted.cost_s
    assert max(served_s.values()) - min(served_s.values()) <= 3 * max(costs)


def test_a_tenant_that_was_idle_gets_no_more_than_its_share(queue) -> None:
    for name in ("busy", "idle"):
        queue.add(Prefill(1), name)
        serve(queue)
    for _ in range(100):
        queue.add(Prefill(10), "busy")
        serve(queue)
    for _ in range(20):
        queue.add(Prefill(10), "busy")
        queue.add(Prefill(10), "idle")
    assert 4 <= [serve(queue).tenant for _ in range(10)].count("busy") <= 6


def test_many_new_names_cost_their_sender_alone() -> None:
    """An earlier tenant keeps its half against a thousand names with one request each."""
    queue, rng = make_queue(), random.Random(7)
    queue.add(Prefill(10), "known")
    serve(queue)
    served_s = {"known": 0.0, "new": 0.0}
    name_count = 0
    for _ in range(2_000):
        while sum(waiting.tenant == "known" for waiting in queue.in_order()) < 2:
            queue.add(Prefill(10), "known")
        while len(queue.in_order()) < 60:
            name_count += 1
            queue.add(Prefill(rng.randint(1, 10)), f"new-{name_count}")
        admitted = serve(queue)
        served_s["known" if admitted.tenant == "known" else "new"] += admitted.cost_s
    assert name_count > 1_000
    assert served_s["known"] > 0.45 * sum(served_s.values())


def test_the_number_of_remembered_shares_is_bounded() -> None:
    shares = FairShares()
    for number in range(1_000):
        shares.charge(f"t{number}", f"t{number}", 1.0)
        shares.charge("slow", "slow", 2.0)
        assert len(shares._next_start) <= 2 * SEPARATE_SHARES + 1
    assert shares.starts(["t0"]) == {"t0": shares._virtual_time}


def test_a_removed_request_leaves_no_state(queue) -> None:
    queue.remove(queue.add(Prefill(5), "a"))
    assert (queue.in_order(), queue._queues) == ([], {})


def test_behind_the_sorted_head_the_order_is_that_of_arrival() -> None:
    for queue in (make_queue(), make_queue(math.inf)):
        for number in range(1_000):
            queue.add(Prefill(1 + number % 13))
        in_order = queue.in_order()
        assert len(in_order) == 1_000
        numbers = [waiting.number for waiting in in_order[SORTED_HEAD:]]
        assert numbers == sorted(numbers)
    without_budget = make_queue(0.0)
    for number in range(4 * BUDGET_HEAD):
        without_budget.add(Prefill(1 + number % 13))
    assert [waiting.number for waiting in without_budget.in_order()] == list(range(4 * BUDGET_HEAD))


def test_a_separate_ledger_detects_exceeded_budgets() -> None:
    queue = make_queue(0.4)
    ledger = BoundLedger(queue)
    first, long_request, short_request = (queue.add(Prefill(tokens)) for tokens in (10, 50, 14))
    queue.admit([short_request])  # `first` may be passed by 4, `long_request` by 20
    assert (ledger.violations, ledger.max_used_fraction) == (1, 14 / 4)
    queue.admit([first, long_request])
    assert ledger.violations == 1


def test_a_separate_ledger_detects_any_overtaking_without_budgets() -> None:
    queue = make_queue(0.0)
    ledger = BoundLedger(queue)
    _, later = queue.add(Prefill(10)), queue.add(Prefill(5))
    queue.admit([later])
    assert (ledger.violations, ledger.max_used_fraction) == (1, math.inf)
