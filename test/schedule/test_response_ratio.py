"""The order of the queue: short first, nobody starved whatever comes, tenants in fair shares."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_canopy.schedule.fair_shares import OWN_TURNS, REMEMBERED
from sglang_canopy.schedule.prefill_cost import Prefill, PrefillCost
from sglang_canopy.schedule.response_ratio import OLDEST_SHARE, RANKED, ResponseRatio, Waiting


def queue(oldest_share: float = OLDEST_SHARE) -> ResponseRatio:
    """A queue where a token costs a second."""
    cost = PrefillCost()
    cost.adopt((0.0, 1.0, 0.0, 0.0))
    return ResponseRatio(cost, oldest_share)


def serve(line: ResponseRatio, now: float) -> Waiting:
    """Let the first one in."""
    waiting = line.order(now)[0]
    line.let_in([waiting])
    return waiting


def test_the_rank_is_waited_and_cost_over_cost() -> None:
    line = queue(oldest_share=0.0)
    long = line.add(0.0, Prefill(100))
    short = line.add(80.0, Prefill(10))
    # At 85 s: 1.85 against 1.5; at 100 s: 2.0 against 3.0.
    assert line.order(85.0) == [long, short]
    assert line.order(100.0) == [short, long]


def test_equal_ranks_go_in_order_of_arrival() -> None:
    line = queue()
    made = [line.add(5.0, Prefill(10)) for _ in range(20)]
    assert line.order(5.0) == made
    assert line.order(50.0) == made


def test_what_became_cached_moves_up() -> None:
    line = queue(oldest_share=0.0)
    first, second = line.add(0.0, Prefill(50)), line.add(0.0, Prefill(60))
    assert line.order(10.0) == [first, second]
    line.update(second, Prefill(5, 55))
    assert line.order(10.0) == [second, first]


def test_it_is_counted_who_was_let_in_for_age() -> None:
    line = queue(oldest_share=0.5)
    long = line.add(0.0, Prefill(30))
    for _ in range(10):
        line.add(0.0, Prefill(10))
    let_in = [serve(line, 100.0) for _ in range(8)]  # each short one pays 5 of the 30
    assert let_in.index(long) == 6
    assert line.let_in_by == {"rank": 7, "age": 1}


def test_loading_counts() -> None:
    cost = PrefillCost()
    cost.adopt((0.0, 1e-3, 0.0, 1e-4))
    line = ResponseRatio(cost, 0.0)
    loads = line.add(0.0, Prefill(10, 1_000, 1_000))
    resident = line.add(0.0, Prefill(10, 1_000))
    assert line.order(1.0) == [resident, loads]


def test_a_higher_priority_always_goes_first() -> None:
    line = queue()
    low = [line.add(0.0, Prefill(1), urgency=0) for _ in range(5)]
    high = [line.add(9.0, Prefill(500), urgency=3) for _ in range(5)]
    order = line.order(100.0)
    assert set(order[:5]) == set(high)
    assert set(order[5:]) == set(low)


def test_order_changes_nothing() -> None:
    line, draw = queue(), random.Random(1)
    for number in range(300):
        line.add(number / 10, Prefill(draw.randint(1, 500)), draw.choice("abc"), draw.randint(0, 2))
    assert line.order(60.0) == line.order(60.0)
    assert sorted(w.number for w in line.order(60.0)) == list(range(300))


@st.composite
def loads(draw) -> list[tuple[float, int]]:
    """Gaps and costs of arrivals, a server's work a second: from idle to three times saturated."""
    count = draw(st.integers(2, 60))
    costs = draw(st.lists(st.integers(1, 200), min_size=count, max_size=count))
    load = draw(st.floats(0.3, 3.0))
    return [(cost / load, cost) for cost in costs]


@settings(max_examples=150, deadline=None)
@given(loads(), st.sampled_from([0.05, 0.2, 0.5, 1.0]), st.randoms(use_true_random=False))
def test_nobody_is_passed_by_more_than_the_bound_whatever_comes(load, share, draw) -> None:
    """Requests come without end, small ones after each: the worst that HRRN can be given."""
    line = queue(share)
    dearest = max(cost for _, cost in load)
    owed: dict[int, tuple[float, float]] = {}
    let_in, now, at = 0.0, 0.0, 0.0
    arrivals = []
    for gap, cost in load:
        at += gap
        arrivals.append((at, cost))
        arrivals += [(at + gap * i / 9, 1) for i in range(draw.randint(0, 8))]
    arrivals.sort()

    def come(until: float) -> None:
        while arrivals and arrivals[0][0] <= until:
            time, cost = arrivals.pop(0)
            ahead = sum(waiting.cost for waiting in line)
            made = line.add(time, Prefill(cost))
            bound = (1 + 1 / share) * (ahead + dearest) + cost
            owed[made.number] = (let_in, bound)

    while arrivals or len(line):
        come(now)
        if not len(line):
            now = arrivals[0][0]
            continue
        served = serve(line, now)
        now += served.cost
        let_in += served.cost
        since, bound = owed.pop(served.number)
        assert let_in - since <= bound + 1e-6


def simulate(pick, requests: list[tuple[float, int]]) -> list[float]:
    """Waits of ``requests`` (time, cost), one at a time, in the order that ``pick`` gives."""
    line, waits, now = queue(), [], 0.0
    pending = list(reversed(requests))
    while pending or len(line):
        while pending and pending[-1][0] <= now:
            time, cost = pending.pop()
            line.add(time, Prefill(cost))
        if not len(line):
            now = pending[-1][0]
            continue
        served = pick(line, now)
        line.let_in([served])
        waits.append(now - served.arrived)
        now += served.cost
    return waits


@pytest.mark.parametrize("seed", range(3))
def test_at_150_percent_the_mean_stays_far_below_first_come_first_served(seed: int) -> None:
    draw, requests, time = random.Random(seed), [], 0.0
    for _ in range(1_500):
        cost = max(1, min(3_000, int(draw.lognormvariate(3.5, 1.3))))
        requests.append((time, cost))
        time += draw.expovariate(1.0) * 77 / 1.5  # the mean cost, at 1.5 times what is served
    fcfs = simulate(lambda line, _: next(iter(line)), requests)
    ours = simulate(lambda line, now: line.order(now, 1)[0], requests)
    assert sum(ours) < 0.6 * sum(fcfs)
    assert max(ours) < 2.5 * max(fcfs)


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.integers(1, 50), min_size=2, max_size=6),
    st.randoms(use_true_random=False),
)
def test_tenants_with_work_get_equal_seconds(costs, draw) -> None:
    """Each tenant's requests cost its own; the many cheap ones get no more than the few dear."""
    line = queue()
    names = [f"t{i}" for i in range(len(costs))]
    got = dict.fromkeys(names, 0.0)

    def fill() -> None:
        for name, cost in zip(names, costs, strict=True):
            while sum(w.tenant == name for w in line) < 3:
                line.add(now, Prefill(cost), name)

    now = 0.0
    for name, cost in zip(names, costs, strict=True):  # each is known before it is measured
        line.add(0.0, Prefill(cost), name)
    while len(line):
        serve(line, 0.0)
    for _ in range(draw.randint(100, 300)):
        fill()
        served = serve(line, now)
        now += served.cost
        got[served.tenant] += served.cost
    assert max(got.values()) - min(got.values()) <= 3 * max(costs)


def test_a_tenant_that_was_idle_has_saved_nothing_up() -> None:
    line = queue()
    for name in ("busy", "idle"):
        line.add(0.0, Prefill(1), name)
        serve(line, 0.0)
    for _ in range(100):
        line.add(0.0, Prefill(10), "busy")
        serve(line, 0.0)
    for _ in range(20):
        line.add(0.0, Prefill(10), "busy")
        line.add(0.0, Prefill(10), "idle")
    turns = [serve(line, 0.0).tenant for _ in range(10)]
    assert 4 <= turns.count("busy") <= 6


def test_a_flood_of_names_costs_its_sender_alone() -> None:
    """A known tenant keeps its half against a thousand names that were made up for one request."""
    line, draw = queue(), random.Random(7)
    line.add(0.0, Prefill(10), "known")
    serve(line, 0.0)
    got = {"known": 0.0, "flood": 0.0}
    invented, now = 0, 0.0
    for _ in range(2_000):
        while sum(w.tenant == "known" for w in line) < 2:
            line.add(now, Prefill(10), "known")
        while len(line) < 60:
            invented += 1
            line.add(now, Prefill(draw.randint(1, 10)), f"made-up-{invented}")
        served = serve(line, now)
        now += served.cost
        got["known" if served.tenant == "known" else "flood"] += served.cost
    assert invented > 1_000
    assert got["known"] > 0.45 * sum(got.values())


def test_what_is_remembered_of_tenants_is_bounded() -> None:
    line = queue()
    for number in range(5_000):
        line.add(0.0, Prefill(1 + number % 7), f"t{number}")
        serve(line, 0.0)
    shares = line.shares
    assert len(shares._served) <= REMEMBERED
    assert len(shares._own) <= OWN_TURNS + 1
    assert len(shares._work) <= 2 * OWN_TURNS + 1
    assert line._lines == {}


def test_a_request_that_was_given_up_leaves_nothing() -> None:
    line = queue()
    gone = line.add(0.0, Prefill(5), "a")
    line.remove(gone)
    line.remove(gone)
    line.let_in([gone])
    assert (len(line), line.order(1.0), line._lines) == (0, [], {})


def test_behind_the_ranked_ones_everyone_is_in_order_of_arrival() -> None:
    line = queue()
    for number in range(RANKED + 500):
        line.add(float(number), Prefill(1 + number % 13))
    order = line.order(1e4, places=16)
    assert len(order) == RANKED + 500
    assert all(a.number < b.number for a, b in pairwise(order[16:]))


def test_two_ranks_with_different_timings_decide_equally() -> None:
    """Each rank times its batches with its own clock; both adopt what the first one fitted."""
    draw, ranks = random.Random(11), [queue(), queue()]
    for step in range(600):
        for _ in range(draw.randint(0, 3)):
            tokens, tenant = draw.randint(1, 4_000), draw.choice("ab")
            for line in ranks:
                line.add(step / 10, Prefill(tokens, tokens // 2), tenant)
        orders = [[w.number for w in line.order(step / 10)] for line in ranks]
        assert orders[0] == orders[1]
        for line, skew in zip(ranks, (1.0, draw.uniform(0.2, 5.0)), strict=True):
            admitted = line.order(step / 10)[:2]
            line.let_in(admitted)
            line.cost.add([w.prefill for w in admitted], skew * draw.uniform(0.01, 2.0))
        if step % 32 == 31:
            sent = ranks[0].cost.fitted()
            for line in ranks:
                line.cost.adopt(sent)
                line.reprice()
    assert ranks[0].cost.fitted() != ranks[1].cost.fitted()
