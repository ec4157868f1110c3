"""The order of the queue: shortest first, no request overtaken by more than its budget, tenants in fair
shares."""

import math
import random
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_canopy.schedule.bounded_shortest import COST_FACTOR, MIN_S, SORTED_HEAD, BoundedShortest
from sglang_canopy.schedule.cost import Prefill, PrefillCost
from sglang_canopy.schedule.cost_queue import TIGHT_HEAD, Waiting
from sglang_canopy.schedule.fair_shares import SEPARATE_SHARES, FairShares
from support.bound_ledger import BoundLedger


def queue(cost_factor: float = 1.0, least_s: float = 0.0) -> BoundedShortest:
    """Return a queue in which a token costs a second."""
    cost = PrefillCost()
    cost.adopt((0.0, 1.0, 0.0, 0.0))
    return BoundedShortest(cost, cost_factor, least_s)


def serve(line: BoundedShortest) -> Waiting:
    """Admit the first request."""
    waiting = line.in_order()[0]
    line.admit([waiting])
    return waiting


@pytest.fixture
def line():
    return queue()


def test_the_shortest_is_next_until_a_budget_is_used_up(line) -> None:
    long = line.add(Prefill(100))  # finds nothing: a budget of 100
    shorts = [line.add(Prefill(40)) for _ in range(4)]
    assert [serve(line) for _ in range(3)] == [*shorts[:2], long]
    assert [serve(line) for _ in range(2)] == shorts[2:]
    assert line.admitted_by == {"shortest": 4, "budget": 1}


def test_equal_requests_are_admitted_in_order_of_arrival(line) -> None:
    made = [line.add(Prefill(10)) for _ in range(20)]
    assert line.in_order() == made


def test_no_budget_is_first_come_first_served() -> None:
    line, draw = queue(0.0), random.Random(3)
    made = [line.add(Prefill(draw.randint(1, 50))) for _ in range(60)]
    assert line.in_order() == made


def test_an_infinite_factor_is_shortest_first() -> None:
    line, draw = queue(math.inf), random.Random(3)
    made = [line.add(Prefill(draw.randint(1, 50))) for _ in range(60)]
    assert line.in_order() == sorted(made, key=lambda one: (one.cost, one.number))


def test_requests_with_newly_cached_prefixes_move_up() -> None:
    line = queue(math.inf)
    first, second = line.add(Prefill(50)), line.add(Prefill(60))
    assert line.in_order() == [first, second]
    line.update(second, Prefill(5, 55))
    assert line.in_order() == [second, first]


def test_a_retracted_request_keeps_its_place_and_remaining_budget(line) -> None:
    first = line.add(Prefill(100))
    line.admit([line.add(Prefill(70))])
    line.admit([first])
    younger = line.add(Prefill(40))
    line.requeue(first, Prefill(110))
    assert line._queue_of(first).passing.allowance(first.position) == 30.0
    assert line.in_order() == [first, younger]
    line.admit([first, younger])
    assert not line.in_order()


def test_no_request_passes_a_chunked_prefill_without_budget(line) -> None:
    long = line.add(Prefill(100))
    shorts = [line.add(Prefill(60)) for _ in range(2)]
    line.admit([long])
    line.set_chunked_prompt(long)
    assert line.over_budget(line.in_order(), 1000) == shorts[1:]
    assert line.select(line.in_order(), lambda _one: True) == shorts[:1]
    line.admit(shorts[:1])
    assert line.over_budget(line.in_order(), 1000) == shorts[1:]
    assert line._queue_of(shorts[1]).passing.allowance(shorts[1].position) == 60.0
    line.reprice()  # no state is lost in a rebuild
    assert line.over_budget(line.in_order(), 1000) == shorts[1:]
    line.set_chunked_prompt(None)
    assert line.over_budget(line.in_order(), 1000) == []


def test_loading_counts() -> None:
    cost = PrefillCost()
    cost.adopt((0.0, 1e-3, 0.0, 1e-4))
    line = BoundedShortest(cost)
    loads = line.add(Prefill(10, 1_000, 1_000))
    resident = line.add(Prefill(10, 1_000))
    assert line.in_order() == [resident, loads]


def test_a_higher_priority_is_always_admitted_first(line) -> None:
    low = [line.add(Prefill(1), urgency=0) for _ in range(5)]
    high = [line.add(Prefill(500), urgency=3) for _ in range(5)]
    order = line.in_order()
    assert set(order[:5]) == set(high)
    assert set(order[5:]) == set(low)


def test_an_unserved_turn_is_first_regardless_of_service() -> None:
    shares = FairShares()
    shares.charge("served", "served", 0.25)
    assert shares.starts(["served", "new"]) == {"served": 0.25, "new": 0.0}


def test_only_the_requests_that_the_tokens_of_a_step_reach_are_checked() -> None:
    line = queue(0.0)
    oldest, passed, younger = (line.add(Prefill(tokens)) for tokens in (100, 40, 60))
    order = [oldest, younger, passed]
    assert line.over_budget(order, 100) == []
    assert line.over_budget(order, 101) == [younger]


@settings(max_examples=2 * settings.default.max_examples)
@given(st.sampled_from([0.0, 1.0, 10.0]), st.integers(1, 30), st.randoms(use_true_random=False))
def test_no_request_is_passed_beyond_the_bound(cost_factor, step, draw) -> None:
    """An engine with steps of ``step`` seconds, a prompt in chunks, and others that share its steps.
    Requests arrive at up to three times the capacity, and some clients disconnect."""
    least_s = 4.0
    line = queue(cost_factor, least_s)
    done, rest = 0.0, 0.0  # seconds computed; of the chunk still to compute
    chunk: Waiting | None = None
    owed: dict[int, tuple[float, float]] = {}
    for _ in range(draw.randint(10, 120)):
        line.set_chunked_prompt(chunk)
        for _ in range(draw.randrange(4)):
            cost = draw.choice([1, 1, 2, 5, draw.randint(1, 80)])
            older = sum(one.cost for one in line.in_order()) + rest
            made = line.add(Prefill(cost))
            owed[made.number] = (done, older + (1 + cost_factor) * cost + least_s)
        if line.in_order() and draw.random() < 0.1:
            line.remove(draw.choice(line.in_order()))
        left = float(step)
        order = line.in_order()
        if chunk is not None:
            room = [left / 2]

            def fits(waiting: Waiting, room: list[float] = room) -> bool:
                if waiting.cost <= room[0]:
                    room[0] -= waiting.cost
                    return True
                return False

            sharing = line.select(order, fits)
            for waiting in sharing:
                line.admit([waiting])
                done += waiting.cost
                left -= waiting.cost
                since, bound = owed.pop(waiting.number)
                assert done - since <= bound + 1e-6
            taken = min(rest, left)
            done, rest, left = done + taken, rest - taken, left - taken
            if rest > 0:
                continue
            since, bound = owed.pop(chunk.number)
            assert done - since <= bound + 1e-6
            chunk = None
            continue
        for waiting in order:
            if left <= 0:
                break
            line.admit([waiting])
            taken = min(waiting.cost, left)
            done, left, rest = done + taken, left - taken, waiting.cost - taken
            if rest > 0:
                chunk = waiting
                break
            since, bound = owed.pop(waiting.number)
            assert done - since <= bound + 1e-6


def simulate(pick, requests: list[tuple[float, int]]) -> list[float]:
    """Waits of ``requests`` (time, cost), one at a time, in the order that ``pick`` gives."""
    line, waits, now = queue(COST_FACTOR, MIN_S), [], 0.0
    pending = list(reversed(requests))
    while pending or line.in_order():
        while pending and pending[-1][0] <= now:
            time, cost = pending.pop()
            line.add(Prefill(cost), request=time)
        if not line.in_order():
            now = pending[-1][0]
            continue
        served = pick(line)
        line.admit([served])
        waits.append(now - served.request)
        now += served.cost
    return waits


@pytest.mark.parametrize("seed", range(3))
def test_at_150_percent_the_mean_stays_below_first_come_first_served(seed: int) -> None:
    draw, requests, time = random.Random(seed), [], 0.0
    for _ in range(1_500):
        cost = max(1, min(3_000, int(draw.lognormvariate(3.5, 1.3))))
        requests.append((time, cost))
        time += draw.expovariate(1.0) * 77 / 1.5  # the mean cost, at 1.5 times the capacity
    fcfs = simulate(lambda line: line.in_order(0)[0], requests)
    ours = simulate(lambda line: line.in_order(1)[0], requests)
    assert sum(ours) < 0.7 * sum(fcfs)
    assert max(ours) < 2.5 * max(fcfs)


@given(st.lists(st.integers(1, 50), min_size=2, max_size=6), st.randoms(use_true_random=False))
def test_tenants_with_work_get_equal_seconds(costs, draw) -> None:
    """Each tenant's requests cost its own; the many cheap ones get no more than the few dear."""
    line = queue()
    names = [f"t{i}" for i in range(len(costs))]
    got = dict.fromkeys(names, 0.0)

    def fill() -> None:
        for name, cost in zip(names, costs, strict=True):
            while sum(w.tenant == name for w in line.in_order()) < 3:
                line.add(Prefill(cost), name)

    now = 0.0
    for name, cost in zip(names, costs, strict=True):  # each is known before it is measured
        line.add(Prefill(cost), name)
    while line.in_order():
        serve(line)
    for _ in range(draw.randint(100, 300)):
        fill()
        served = serve(line)
        now += served.cost
        got[served.tenant] += served.cost
    assert max(got.values()) - min(got.values()) <= 3 * max(costs)


def test_a_tenant_that_was_idle_has_saved_nothing_up(line) -> None:
    for name in ("busy", "idle"):
        line.add(Prefill(1), name)
        serve(line)
    for _ in range(100):
        line.add(Prefill(10), "busy")
        serve(line)
    for _ in range(20):
        line.add(Prefill(10), "busy")
        line.add(Prefill(10), "idle")
    turns = [serve(line).tenant for _ in range(10)]
    assert 4 <= turns.count("busy") <= 6


def test_a_flood_of_names_costs_its_sender_alone() -> None:
    """A known tenant keeps its half against a thousand names that were made up for one request."""
    line, draw = queue(), random.Random(7)
    line.add(Prefill(10), "known")
    serve(line)
    got = {"known": 0.0, "flood": 0.0}
    invented, now = 0, 0.0
    for _ in range(2_000):
        while sum(w.tenant == "known" for w in line.in_order()) < 2:
            line.add(Prefill(10), "known")
        while len(line.in_order()) < 60:
            invented += 1
            line.add(Prefill(draw.randint(1, 10)), f"made-up-{invented}")
        served = serve(line)
        now += served.cost
        got["known" if served.tenant == "known" else "flood"] += served.cost
    assert invented > 1_000
    assert got["known"] > 0.45 * sum(got.values())


def test_the_work_of_turns_that_had_enough_is_forgotten() -> None:
    shares = FairShares()
    for number in range(1_000):
        shares.charge(f"t{number}", f"t{number}", 1.0)
        shares.charge("slow", "slow", 2.0)
        assert len(shares._next_start) <= 2 * SEPARATE_SHARES + 1
    assert shares.starts(["t0"]) == {"t0": shares._virtual_time}


def test_a_request_that_was_given_up_leaves_nothing(line) -> None:
    gone = line.add(Prefill(5), "a")
    line.remove(gone)
    assert (line.in_order(), line._queues) == ([], {})


def test_behind_the_places_that_are_worked_out_everyone_is_in_order_of_arrival() -> None:
    for line in (queue(), queue(math.inf)):
        for number in range(1_000):
            line.add(Prefill(1 + number % 13))
        order = line.in_order()
        assert len(order) == 1_000
        assert all(a.number < b.number for a, b in pairwise(order[SORTED_HEAD:]))
    tight = queue(0.0)
    for number in range(4 * TIGHT_HEAD):
        tight.add(Prefill(1 + number % 13))
    assert [one.number for one in tight.in_order()] == list(range(4 * TIGHT_HEAD))


def test_a_separate_ledger_detects_exceeded_budgets() -> None:
    line = queue(0.4)
    ledger = BoundLedger(line)
    first, long, short = line.add(Prefill(10)), line.add(Prefill(50)), line.add(Prefill(14))
    line.admit([short])  # `first` may be passed by 4, `long` by 20
    assert (ledger.over, ledger.fullest) == (1, 14 / 4)
    line.admit([first, long])
    assert ledger.over == 1
