"""A scheduler's queue under random events: no request is overtaken by more than its budget."""

import math
import random
from dataclasses import dataclass, field

import pytest

from sglang_canopy.schedule.arranged import Arranged
from sglang_canopy.schedule.bounded_shortest import BoundedShortest
from sglang_canopy.schedule.cost import Prefill, PrefillCost
from support.bound_ledger import BoundLedger

BLOCK_TOKENS = 4
STEP_TOKENS = 24


@dataclass(eq=False)
class Job:
    path: tuple[int, ...]
    """A number for each block; equal ones after an equal prefix are the same block."""
    done: int = 0
    """Tokens that were computed."""
    urgent: int = 0

    @property
    def tokens(self) -> int:
        return BLOCK_TOKENS * len(self.path)


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

    # Fields of requests that a queue reads.

    def tenant(self, job: Job) -> None:
        return None

    def urgency(self, job: Job) -> int:
        return job.urgent

    def match(self, job: Job) -> None:
        pass

    def prefill(self, job: Job, is_repeated: bool) -> Prefill:
        cached = self.cached_tokens(job)
        return Prefill(job.tokens - cached, cached)

    def time_s(self) -> float:
        return 0.0

    def unlocked_tokens(self, job: Job) -> int:
        return 0

    def step_tokens(self) -> int:
        return STEP_TOKENS

    # Steps and events.

    def cached_tokens(self, job: Job) -> int:
        blocks = 0
        while blocks < len(job.path) - 1 and job.path[: blocks + 1] in self.cached:
            blocks += 1
        return BLOCK_TOKENS * blocks

    def step(self, hidden: int = 0) -> None:
        """Make a step. ``hidden``: number of the queue's first requests that the gate holds."""
        hidden_jobs, self.queue = self.queue[:hidden], self.queue[hidden:]
        self.queue = list(self.arranged.arrange(self.queue, self.chunk))
        excluded = {id(job) for job in self.arranged.over_budget()}
        self.queue = self.arranged.current()
        remaining, admitted = STEP_TOKENS, []
        if self.chunk is not None:
            rest_tokens = self.chunk.tokens - self.chunk.done
            shared = self.arranged.share_step(rest_tokens, STEP_TOKENS, 1, math.inf)
            limit = STEP_TOKENS
            if shared is not None:
                self.queue = self.arranged.current()
                excluded, limit = {id(job) for job in shared[0]}, shared[1]
                assert limit > 0, "SGLang ends if nothing is left for the chunked prompt"
            tokens = min(rest_tokens, limit)
            self.chunk.done += tokens
            remaining -= tokens
        for job in self.queue:
            if remaining <= 0:
                break
            if id(job) not in excluded:
                job.done = self.cached_tokens(job)
                tokens = min(job.tokens - job.done, remaining)
                job.done += tokens
                remaining -= tokens
                admitted.append(job)
        previous_chunk, self.chunk = self.chunk, None
        for job in [*admitted, *([previous_chunk] if previous_chunk is not None else [])]:
            if job.done < job.tokens:
                self.chunk = job
        if admitted:
            self.arranged.admit(admitted)
        self.queue = [*hidden_jobs, *(job for job in self.queue if job not in admitted)]
        for job in [*self.computing, *admitted]:
            if job.done == job.tokens:
                self.cached.update(job.path[: depth + 1] for depth in range(len(job.path)))
        self.computing = [j for j in [*self.computing, *admitted] if j.done < j.tokens]

    def evict(self, block: int) -> None:
        self.cached = {path for path in self.cached if block not in path}

    def disconnect(self, index: int) -> None:
        """A client disconnects; the order gets a call or misses the request."""
        if self.queue:
            job = self.queue.pop(index % len(self.queue))
            if index % 2:
                self.arranged.forget(job)


LENGTHS = (1, 1, 2, 3, 5, 9, 14)
"""Blocks of a prompt."""


def random_event(scheduler: Scheduler, draw: random.Random) -> None:
    """A request arrives, or a step is made, or tokens are evicted, or a client disconnects."""
    event = draw.random()
    if event < 0.45:
        blocks = draw.choice(LENGTHS)
        scheduler.queue.append(Job(tuple(draw.choice((0, 0, 0, 1, 2)) for _ in range(blocks))))
    elif event < 0.85:
        scheduler.step(hidden=draw.choice((0, 0, 0, 0, 1, 2)))
    elif event < 0.96:
        scheduler.evict(draw.choice((0, 1, 2)))
    else:
        scheduler.disconnect(draw.randrange(20))


def test_no_budget_is_exceeded_with_caches_and_held_requests() -> None:
    max_used_share, admitted_by_budget = 0.0, 0
    for seed in range(150):
        draw, scheduler = random.Random(seed), Scheduler()
        for _ in range(120):
            random_event(scheduler, draw)
            assert scheduler.ledger.violations == 0, (seed, scheduler.ledger.max_used_share)
        max_used_share = max(max_used_share, scheduler.ledger.max_used_share)
        admitted_by_budget += scheduler.order.admitted_by["budget"]
    assert max_used_share > 0.9, "budgets were never used up"
    assert admitted_by_budget > 100


def test_the_queue_advances_although_costs_rise_during_a_chunked_prefill() -> None:
    scheduler = Scheduler()
    scheduler.queue.append(Job((9,) * 20))
    scheduler.step()
    assert scheduler.chunk is not None
    shared_path = (0, 1, 2, 3, 4)
    scheduler.cached.update(shared_path[: depth + 1] for depth in range(len(shared_path)))
    scheduler.queue += [Job((*shared_path, 10 + number)) for number in range(30)]
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
    assert long.done == 2 * STEP_TOKENS - (0 if urgent else 2 * BLOCK_TOKENS)


@pytest.mark.parametrize("blocks", [3, 4])
def test_a_prompt_shares_the_step_if_it_fits_its_half_exactly(blocks) -> None:
    scheduler = Scheduler()
    scheduler.queue = [Job(tuple(range(20)))]
    scheduler.step()
    fits = BLOCK_TOKENS * blocks <= STEP_TOKENS // 2
    scheduler.queue.append(Job(tuple(range(100, 100 + blocks))))
    scheduler.step()
    assert len(scheduler.queue) == (0 if fits else 1)


def test_a_request_that_waits_alone_is_not_looked_up_before_sglang_admits_it() -> None:
    scheduler, calls = Scheduler(), list[bool]()
    prefill = scheduler.prefill
    scheduler.prefill = lambda job, repeat: calls.append(repeat) or prefill(job, repeat)  # type: ignore[method-assign,func-returns-value]
    (first, second) = (Job((number, 1, 2)) for number in range(2))
    assert scheduler.arranged.arrange([first]) == scheduler.arranged.current() == [first]
    assert scheduler.arranged.requests() == [first]
    assert calls == []
    scheduler.arranged.admit([first])
    assert calls == [False]
    for _ in range(2):  # it is not admitted, so it needs a cost and a budget
        scheduler.arranged.arrange([second])
    assert calls == [False, False]
    assert [waiting.request for waiting in scheduler.order.in_order()] == [second]
