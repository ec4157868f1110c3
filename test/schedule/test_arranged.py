"""A scheduler's queue under random events: no request is overtaken by more than its budget."""

import math
import random
from dataclasses import dataclass, field

import pytest

from sglang_canopy.schedule.arranged import Arranged
from sglang_canopy.schedule.bounded_shortest import BoundedShortest
from sglang_canopy.schedule.cost import Prefill, PrefillCost
from support.bound_ledger import BoundLedger

BLOCK = 4
STEP = 24
"""Tokens of a step."""


@dataclass(eq=False)
class Job:
    path: tuple[int, ...]
    """A number for each block; equal ones after an equal prefix are the same block."""
    done: int = 0
    """Tokens that were computed."""
    urgent: int = 0

    @property
    def tokens(self) -> int:
        return BLOCK * len(self.path)


@dataclass
class Scheduler:
    """Takes from the head of its queue as SGLang does: the last prompt of a step in chunks."""

    cached: set[tuple[int, ...]] = field(default_factory=set)
    queue: list[Job] = field(default_factory=list)
    chunk: Job | None = None
    computing: list[Job] = field(default_factory=list)

    def __post_init__(self) -> None:
        cost = PrefillCost()
        cost.adopt((0.0, 1.0, 0.0, 0.0))  # a token costs a second
        self.order = BoundedShortest(cost, 0.5, 3.0)
        self.ledger = BoundLedger(self.order)
        self.arranged = Arranged(self.order, self)

    # fields of requests that a queue reads

    def tenant(self, job: Job) -> None:
        return None

    def urgency(self, job: Job) -> int:
        return job.urgent

    def match(self, job: Job) -> None:
        pass

    def prefill(self, job: Job, again: bool) -> Prefill:
        cached = self.cached_tokens(job)
        return Prefill(job.tokens - cached, cached)

    def time_s(self) -> float:
        return 0.0

    def unlocked_tokens(self, job: Job) -> int:
        return 0

    def step_tokens(self) -> int:
        return STEP

    # what it does

    def cached_tokens(self, job: Job) -> int:
        blocks = 0
        while blocks < len(job.path) - 1 and job.path[: blocks + 1] in self.cached:
            blocks += 1
        return BLOCK * blocks

    def step(self, hidden: int = 0) -> None:
        """Make a step. ``hidden``: number of the queue's first requests that are held back."""
        held, self.queue = self.queue[:hidden], self.queue[hidden:]
        self.queue = list(self.arranged.arrange(self.queue, self.chunk))
        left_out = {id(job) for job in self.arranged.over_budget()}
        self.queue = self.arranged.current()
        room, entered = STEP, []
        if self.chunk is not None:
            rest = self.chunk.tokens - self.chunk.done
            shared = self.arranged.share_step(rest, STEP, 1, math.inf)
            limit = STEP
            if shared is not None:
                self.queue = self.arranged.current()
                left_out, limit = {id(job) for job in shared[0]}, shared[1]
                assert limit > 0, "SGLang ends where nothing is left for the prompt under way"
            taken = min(rest, limit)
            self.chunk.done += taken
            room -= taken
        for job in self.queue:
            if room <= 0:
                break
            if id(job) not in left_out:
                job.done = self.cached_tokens(job)
                taken = min(job.tokens - job.done, room)
                job.done += taken
                room -= taken
                entered.append(job)
        was, self.chunk = self.chunk, None
        for job in [*entered, *([was] if was is not None else [])]:
            if job.done < job.tokens:
                self.chunk = job
        if entered:
            self.arranged.admit(entered)
        self.queue = [*held, *(job for job in self.queue if job not in entered)]
        for job in [*self.computing, *entered]:
            if job.done == job.tokens:
                self.cached.update(job.path[: at + 1] for at in range(len(job.path)))
        self.computing = [j for j in [*self.computing, *entered] if j.done < j.tokens]

    def evict(self, block: int) -> None:
        self.cached = {path for path in self.cached if block not in path}

    def give_up(self, place: int) -> None:
        """A client disconnects; the order gets a call or misses the request."""
        if self.queue:
            job = self.queue.pop(place % len(self.queue))
            if place % 2:
                self.arranged.forget(job)


LENGTHS = (1, 1, 2, 3, 5, 9, 14)
"""Blocks of a prompt."""


def anything(scheduler: Scheduler, draw: random.Random) -> None:
    """A request arrives, or a step is made, or tokens are evicted, or a client disconnects."""
    what = draw.random()
    if what < 0.45:
        blocks = draw.choice(LENGTHS)
        scheduler.queue.append(Job(tuple(draw.choice((0, 0, 0, 1, 2)) for _ in range(blocks))))
    elif what < 0.85:
        scheduler.step(hidden=draw.choice((0, 0, 0, 0, 1, 2)))
    elif what < 0.96:
        scheduler.evict(draw.choice((0, 1, 2)))
    else:
        scheduler.give_up(draw.randrange(20))


def test_no_budget_is_exceeded_with_caches_and_held_requests() -> None:
    fullest, kept = 0.0, 0
    for seed in range(150):
        draw, scheduler = random.Random(seed), Scheduler()
        for _ in range(120):
            anything(scheduler, draw)
            assert scheduler.ledger.over == 0, (seed, scheduler.ledger.fullest)
        fullest = max(fullest, scheduler.ledger.fullest)
        kept += scheduler.order.admitted_by["budget"]
    assert fullest > 0.9, "budgets were never used up"
    assert kept > 100


def test_a_request_with_a_higher_cost_leaves_room_for_the_chunked_prefill() -> None:
    scheduler = Scheduler()
    scheduler.queue.append(Job((9,) * 20))
    scheduler.step()
    assert scheduler.chunk is not None
    begins = (0, 1, 2, 3, 4)
    scheduler.cached.update(begins[: at + 1] for at in range(len(begins)))
    scheduler.queue += [Job((*begins, 10 + number)) for number in range(30)]
    scheduler.step()
    scheduler.evict(0)  # only some of the waiting requests are matched again in a pass
    waiting = len(scheduler.queue)
    for _ in range(3):
        scheduler.step()
    assert len(scheduler.queue) < waiting


@pytest.mark.parametrize("urgent", [0, 1])
def test_lower_priorities_take_nothing_of_urgent_steps(urgent) -> None:
    scheduler = Scheduler()
    long = Job(tuple(range(20)), urgent=urgent)
    scheduler.queue = [long]
    scheduler.step()
    scheduler.queue += [Job((100 + n, 200 + n)) for n in range(3)]
    scheduler.step()
    assert scheduler.chunk is long
    assert len(scheduler.queue) == (3 if urgent else 2)
    assert long.done == 2 * STEP - (0 if urgent else 2 * BLOCK)


@pytest.mark.parametrize("blocks", [3, 4])
def test_a_prompt_shares_the_step_if_it_fits_its_half_exactly(blocks) -> None:
    scheduler = Scheduler()
    scheduler.queue = [Job(tuple(range(20)))]
    scheduler.step()
    fits = BLOCK * blocks <= STEP // 2
    scheduler.queue.append(Job(tuple(range(100, 100 + blocks))))
    scheduler.step()
    assert len(scheduler.queue) == (0 if fits else 1)


def test_a_request_that_waits_alone_is_not_looked_up_before_sglang_admits_it() -> None:
    scheduler, calls = Scheduler(), list[bool]()
    prefill = scheduler.prefill
    scheduler.prefill = lambda job, again: calls.append(again) or prefill(job, again)  # type: ignore[method-assign,func-returns-value]
    (first, second) = (Job((number, 1, 2)) for number in range(2))
    assert scheduler.arranged.arrange([first]) == scheduler.arranged.current() == [first]
    assert scheduler.arranged.requests() == [first]
    assert calls == []
    scheduler.arranged.admit([first])
    assert calls == [False]
    for _ in range(2):  # there is no place: it needs a cost, and a budget
        scheduler.arranged.arrange([second])
    assert calls == [False, False]
    assert [one.request for one in scheduler.order.in_order()] == [second]
