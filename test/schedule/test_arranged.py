"""A scheduler's queue under random events: no request is overtaken by more than its budget."""

import math
import random
from dataclasses import dataclass, field

import pytest

from sglang_canopy.schedule.arranged import ArrangedQueue
from sglang_canopy.schedule.bounded_shortest import BoundedShortest
from sglang_canopy.schedule.cost import Prefill, PrefillCost
from support.bound_ledger import BoundLedger

BLOCK_TOKENS = 4
STEP_TOKENS = 24


@dataclass(eq=False)
class Job:
    path: tuple[int, ...]
    """Numbers of the blocks; equal numbers after an equal prefix are the same block."""
    computed_tokens: int = 0
    urgency: int = 0

    @property
    def tokens(self) -> int:
        return BLOCK_TOKENS * len(self.path)


@dataclass
class Scheduler:
    """A scheduler that admits from the head of its queue as SGLang does, the last prompt of a step in chunks."""

    cached_paths: set[tuple[int, ...]] = field(default_factory=set)
    queue: list[Job] = field(default_factory=list)
    chunk: Job | None = None
    computing: list[Job] = field(default_factory=list)

    def __post_init__(self) -> None:
        cost = PrefillCost()
        cost.adopt((0.0, 1.0, 0.0, 0.0))  # a token costs a second
        self.order = BoundedShortest(cost, 0.5, 3.0)
        self.order.unbacked_tokens = 2 * STEP_TOKENS
        self.ledger = BoundLedger(self.order)
        self.arranged = ArrangedQueue(self.order, self)

    # Fields of requests that a queue reads.

    def tenant(self, job: Job) -> None:
        return None

    def urgency(self, job: Job) -> int:
        return job.urgency

    def match(self, job: Job) -> None:
        pass

    def prefill(self, job: Job, is_repeated: bool) -> Prefill:
        cached_tokens = self.cached_tokens(job)
        return Prefill(job.tokens - cached_tokens, cached_tokens)

    def time_s(self) -> float:
        return 0.0

    def unlocked_tokens(self, job: Job) -> int:
        return 0

    def step_tokens(self) -> int:
        return STEP_TOKENS

    # Steps and events.

    def cached_tokens(self, job: Job) -> int:
        blocks = 0
        while blocks < len(job.path) - 1 and job.path[: blocks + 1] in self.cached_paths:
            blocks += 1
        return BLOCK_TOKENS * blocks

    def step(self, hidden_count: int = 0) -> None:
        """Make a step. ``hidden_count``: how many of the first requests the gate holds."""
        hidden_jobs, self.queue = self.queue[:hidden_count], self.queue[hidden_count:]
        self.queue = list(self.arranged.arrange(self.queue, self.chunk))
        excluded = {id(job) for job in self.arranged.over_budget()}
        self.queue = self.arranged.current()
        remaining_tokens, admitted = STEP_TOKENS, []
        if self.chunk is not None:
            uncomputed_tokens = self.chunk.tokens - self.chunk.computed_tokens
            shared_step = self.arranged.share_step(uncomputed_tokens, STEP_TOKENS, 1, math.inf)
            chunk_limit = STEP_TOKENS
            if shared_step is not None:
                self.queue = self.arranged.current()
                excluded_jobs, chunk_limit = shared_step
                excluded = {id(job) for job in excluded_jobs}
                assert chunk_limit > 0, "SGLang ends if nothing is left for the chunked prompt"
            tokens = min(uncomputed_tokens, chunk_limit)
            self.chunk.computed_tokens += tokens
            remaining_tokens -= tokens
        for job in self.queue:
            if remaining_tokens <= 0:
                break
            if id(job) not in excluded:
                job.computed_tokens = self.cached_tokens(job)
                tokens = min(job.tokens - job.computed_tokens, remaining_tokens)
                job.computed_tokens += tokens
                remaining_tokens -= tokens
                admitted.append(job)
        previous_chunk, self.chunk = self.chunk, None
        for job in [*admitted, *([previous_chunk] if previous_chunk is not None else [])]:
            if job.computed_tokens < job.tokens:
                self.chunk = job
        if admitted:
            self.arranged.admit(admitted)
        self.queue = [*hidden_jobs, *(job for job in self.queue if job not in admitted)]
        for job in [*self.computing, *admitted]:
            if job.computed_tokens == job.tokens:
                self.cached_paths.update(job.path[: depth + 1] for depth in range(len(job.path)))
        started = [*self.computing, *admitted]
        self.computing = [job for job in started if job.computed_tokens < job.tokens]

    def evict(self, block: int) -> None:
        self.cached_paths = {path for path in self.cached_paths if block not in path}

    def disconnect(self, number: int) -> None:
        """Remove a request whose client disconnected; the order is called only for an odd ``number``."""
        if self.queue:
            job = self.queue.pop(number % len(self.queue))
            if number % 2:
                self.arranged.forget(job)


PROMPT_BLOCKS = (1, 1, 2, 3, 5, 9, 14)
"""Lengths of prompts, in blocks."""


def random_event(scheduler: Scheduler, rng: random.Random) -> None:
    """Let a request arrive, make a step, evict a block, or disconnect a client."""
    event = rng.random()
    if event < 0.45:
        blocks = rng.choice(PROMPT_BLOCKS)
        scheduler.queue.append(Job(tuple(rng.choice((0, 0, 0, 1, 2)) for _ in range(blocks))))
    elif event < 0.85:
        scheduler.step(hidden_count=rng.choice((0, 0, 0, 0, 1, 2)))
    elif event < 0.96:
        scheduler.evict(rng.choice((0, 1, 2)))
    else:
        scheduler.disconnect(rng.randrange(20))


def test_no_budget_is_exceeded_with_caches_and_held_requests() -> None:
    max_used_fraction, admitted_by_budget = 0.0, 0
    for seed in range(150):
        rng, scheduler = random.Random(seed), Scheduler()
        for _ in range(120):
            random_event(scheduler, rng)
            assert scheduler.ledger.violations == 0, (seed, scheduler.ledger.max_used_fraction)
        max_used_fraction = max(max_used_fraction, scheduler.ledger.max_used_fraction)
        admitted_by_budget += scheduler.order.admission_counts["budget"]
    assert max_used_fraction > 0.9, "budgets were never used up"
    assert admitted_by_budget > 100


def test_the_queue_advances_although_costs_rise_during_a_chunked_prefill() -> None:
    scheduler = Scheduler()
    scheduler.queue.append(Job((9,) * 20))
    scheduler.step()
    assert scheduler.chunk is not None
    shared_path = (0, 1, 2, 3, 4)
    scheduler.cached_paths.update(shared_path[: depth + 1] for depth in range(len(shared_path)))
    scheduler.queue += [Job((*shared_path, 10 + number)) for number in range(30)]
    scheduler.step()
    scheduler.evict(0)  # only some of the waiting requests are matched again in a pass
    waiting_before = len(scheduler.queue)
    for _ in range(3):
        scheduler.step()
    assert len(scheduler.queue) < waiting_before


@pytest.mark.parametrize("urgency", [0, 1])
def test_lower_priorities_take_nothing_of_urgent_steps(urgency) -> None:
    scheduler = Scheduler()
    long_job = Job(tuple(range(20)), urgency=urgency)
    scheduler.queue = [long_job]
    scheduler.step()
    scheduler.queue += [Job((100 + n, 200 + n)) for n in range(3)]
    scheduler.step()
    assert scheduler.chunk is long_job
    assert len(scheduler.queue) == (3 if urgency else 2)
    assert long_job.computed_tokens == 2 * STEP_TOKENS - (0 if urgency else 2 * BLOCK_TOKENS)


@pytest.mark.parametrize("prompt_blocks", [3, 4])
def test_a_prompt_shares_the_step_if_it_fits_its_half_exactly(prompt_blocks) -> None:
    scheduler = Scheduler()
    scheduler.queue = [Job(tuple(range(20)))]
    scheduler.step()
    is_fitting = BLOCK_TOKENS * prompt_blocks <= STEP_TOKENS // 2
    scheduler.queue.append(Job(tuple(range(100, 100 + prompt_blocks))))
    scheduler.step()
    assert len(scheduler.queue) == (0 if is_fitting else 1)


def test_a_request_that_waits_alone_is_not_looked_up_before_sglang_admits_it() -> None:
    scheduler, lookups = Scheduler(), list[bool]()
    original_prefill = scheduler.prefill
    scheduler.prefill = lambda job, repeat: lookups.append(repeat) or original_prefill(job, repeat)  # type: ignore[method-assign,func-returns-value]
    first, second = (Job((number, 1, 2)) for number in range(2))
    assert scheduler.arranged.arrange([first]) == scheduler.arranged.current() == [first]
    assert scheduler.arranged.requests() == [first]
    assert lookups == []
    scheduler.arranged.admit([first])
    assert lookups == [False]
    for _ in range(2):  # it is not admitted, so it needs a cost and a budget
        scheduler.arranged.arrange([second])
    assert lookups == [False, False]
    assert [waiting.request for waiting in scheduler.order.in_order()] == [second]
