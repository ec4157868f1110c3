"""Waiting for a prefix that another request computes: only for requests ahead, and never for ever."""

import random
from dataclasses import dataclass, field
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from sglang_canopy.schedule.arranged import Arranged
from sglang_canopy.schedule.bounded_shortest import BoundedShortest
from sglang_canopy.schedule.line import Waiting
from sglang_canopy.schedule.prefill_cost import Prefill, PrefillCost
from sglang_canopy.schedule.shared_prefix import deferred

BLOCK = 10


def waiting(number: int, path: list[int], cached: int = 0) -> Waiting:
    prefill = Prefill(BLOCK * len(path) - cached, cached)
    return Waiting(number, None, None, 0, prefill, 1.0, about=path)


def held(order: list[Waiting], begun: Any = (), least: float = 0.0) -> dict[int, int | None]:
    return deferred(order, lambda path: path, begun, BLOCK, least)


def test_only_the_first_of_requests_with_an_uncached_shared_prefix_is_admitted() -> None:
    order = [waiting(7, [1, 2, 3]), waiting(4, [1, 2, 9]), waiting(5, [8, 8]), waiting(6, [1, 5])]
    assert held(order) == {4: 7, 6: 7}


def test_cached_prefixes_are_not_waited_for() -> None:
    assert held([waiting(1, [1, 2, 3], 20), waiting(2, [1, 2, 9], 20)]) == {}


def test_no_request_waits_for_less_than_a_steps_cost() -> None:
    order = [waiting(1, [1, 2, 3, 4]), waiting(2, [1, 2, 3, 9])]
    assert held(order, least=30.0) == {2: 1}
    assert held(order, least=31.0) == {}


def test_one_in_the_middle_of_its_chunks_is_waited_for_until_it_has_passed_the_branch() -> None:
    begun = [[1, 2, 3, 4, 5]]
    assert held([waiting(1, [1, 2, 3, 9], 10)], begun) == {1: None}
    assert held([waiting(1, [1, 2, 3, 9], 30)], begun) == {}


@dataclass(eq=False)
class Asked:
    """A request of the engine below."""

    number: int
    arrived: float
    path: list[int]
    tenant: str | None = None
    blocked: bool = False
    """Not admitted while this is set, even if it is first: it waits for other reasons."""
    done: int = 0
    """Blocks computed."""
    let_in_at: float | None = None


@dataclass
class Engine:
    """Steps of ``budget`` blocks, one prompt in chunks, a tree of all that was computed."""

    budget: int
    queue: list[Asked] = field(default_factory=list)
    tree: set[int] = field(default_factory=set)
    chunked: Asked | None = None
    computed: int = 0
    now: float = 0.0

    def __post_init__(self) -> None:
        cost = PrefillCost(BLOCK * self.budget)
        cost.adopt((0.0, 1.0 / BLOCK, 0.0, 0.0))
        self.line: Arranged[Asked] = Arranged(BoundedShortest(cost), self)

    def tenant(self, one: Asked) -> str | None:
        return one.tenant

    def urgency(self, one: Asked) -> int:
        return 0

    def cached(self, one: Asked) -> int:
        found = 0
        while found < len(one.path) - 1 and one.path[found] in self.tree:
            found += 1
        return found

    def prefill(self, one: Asked, again: bool) -> Prefill:
        found = self.cached(one)
        return Prefill(BLOCK * (len(one.path) - found), BLOCK * found)

    def path(self, one: Asked) -> tuple[list[int], int]:
        return one.path, BLOCK

    @property
    def computing(self) -> list[Asked]:
        return [] if self.chunked is None else [self.chunked]

    def rest(self, one: Asked) -> Prefill:
        return Prefill(BLOCK * (len(one.path) - one.done), BLOCK * one.done)

    def step_tokens_worth(self) -> float:
        return 0.0

    def time_s(self) -> float:
        return self.now

    def step_tokens(self) -> int:
        return BLOCK * self.budget

    def step(self, defers: bool = True) -> bool:
        """One step; whether anything was computed."""
        order = self.line.arrange(self.queue, self.chunked)
        later = self.line.deferred(self.computing) if defers else []
        left, batch = self.budget, []
        if self.chunked is not None:
            batch.append(self.chunked)
        for one in order:
            if one in later or one.blocked:
                continue
            if left <= 0 or self.chunked is not None:
                break
            one.done = self.cached(one)
            left -= len(one.path) - one.done
            batch.append(one)
            one.let_in_at = self.now
        self.queue = [one for one in order if one not in batch]
        self.line.admit(batch)
        left = self.budget
        for one in batch:
            new = min(left, len(one.path) - one.done)
            left -= new
            one.done += new
            self.computed += new
            self.now += new
        for one in batch:
            self.tree.update(one.path[: one.done])
        self.chunked = next((one for one in batch if one.done < len(one.path)), None)
        if not batch and later:
            self.line.nothing_to_do()
        return bool(batch)


def chained(*parts: int) -> list[int]:
    """Blocks whose ids depend on all before them."""
    path, seed = [], 0
    for part in parts:
        seed = hash((seed, part))
        path.append(seed)
    return path


def branches(count: int, shared: int, own: int, tenant: str | None = None) -> list[Asked]:
    first = 1 if tenant is None else len(tenant) + 100
    return [
        Asked(i, 0.0, chained(first, *range(shared), *(1_000 * i + n for n in range(own))), tenant)
        for i in range(1, count + 1)
    ]


def test_a_prefix_of_eight_branches_is_computed_once() -> None:
    engines = {defers: Engine(budget=60, queue=branches(8, 19, 2)) for defers in (True, False)}
    for defers, engine in engines.items():
        while engine.queue or engine.chunked:
            assert engine.step(defers)
    assert engines[True].computed == 20 + 8 * 2
    assert engines[False].computed > 20 + 8 * 2


def test_a_prompt_of_many_steps_is_waited_for_only_up_to_the_branch() -> None:
    engine = Engine(budget=10)
    long = Asked(1, 0.0, chained(*range(100)))
    short = Asked(2, 0.1, chained(*range(15), 777))
    engine.queue = [long]
    engine.step()
    engine.queue.append(short)
    engine.line.arrange(engine.queue, engine.chunked)
    assert engine.line.deferred(engine.computing) == [
        short
    ]  # 10 of its blocks are cached, 15 are shared
    engine.step()
    engine.line.arrange(engine.queue, engine.chunked)
    assert engine.line.deferred(engine.computing) == []  # 20 are
    while engine.queue or engine.chunked:
        engine.step()
    assert engine.computed == 101


def test_tenants_do_not_wait_for_each_other() -> None:
    engine = Engine(budget=100)
    engine.queue = [*branches(1, 19, 2, "a"), *branches(2, 19, 2, "bb")[1:]]
    engine.line.arrange(engine.queue, engine.chunked)
    assert engine.line.deferred(engine.computing) == []


def test_deferred_requests_are_admitted_if_the_first_does_not_fit() -> None:
    """The engine is idle for one pass, and never again for that reason."""
    engine = Engine(budget=100, queue=branches(4, 19, 2))
    engine.queue[0].blocked = True
    steps = []
    while len(engine.queue) > 1:
        steps.append(engine.step())
    assert steps.count(False) <= 1
    assert len(steps) <= 3


def test_no_request_waits_for_an_overtaken_one() -> None:
    engine = Engine(budget=100, queue=branches(3, 19, 2))
    engine.queue[0].blocked = True
    engine.queue.append(Asked(9, 0.0, chained(*range(500, 530))))
    while len(engine.queue) > 1:
        engine.step()
        engine.now += 1.0
        assert engine.now < 200.0


@given(st.randoms(use_true_random=False), st.integers(5, 80))
def test_all_requests_are_served_with_almost_no_extra_computation(
    draw: random.Random, budget: int
) -> None:
    asked = []
    for number in range(1, draw.randint(3, 40)):
        family, shared, own = draw.randrange(4), draw.randrange(0, 30), draw.randrange(1, 20)
        parts = (family, *range(shared), *(1_000 * number + n for n in range(own)))
        asked.append((draw.randrange(0, 200), parts))
    asked.sort()
    done = {}
    for defers in (True, False):
        engine, pending = Engine(budget), list(asked)
        number = 0
        while pending or engine.queue or engine.chunked:
            while pending and pending[0][0] <= engine.now:
                at, parts = pending.pop(0)
                number += 1
                engine.queue.append(Asked(number, float(at), chained(*parts)))
            if not engine.queue and engine.chunked is None:
                engine.now = float(pending[0][0])
                continue
            assert engine.step(defers)
        done[defers] = engine.computed
        assert number == len(asked)
    assert done[True] <= 1.05 * done[False]  # arrivals during a computation differ a little
