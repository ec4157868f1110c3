"""Simulated: waits of short and long prompts where places in the batch, not prefill, are scarce.

    python benchmark/latency/overtaking.py

The order's own code on a server of one prefill or decode step at a time. Clients send their next
request when they have their answer, so the queue never empties. Times are of the simulation's clock.
"""

from __future__ import annotations

import math
import random
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sglang_canopy.schedule.arranged import Arranged
from sglang_canopy.schedule.bounded_shortest import BASE_BUDGET_S, COST_FACTOR, BoundedShortest
from sglang_canopy.schedule.cost import AnswerCost, Prefill, PrefillCost, ServerCost

sys.path.insert(0, str(Path(__file__).parents[1]))
from result_file import write

OUT = Path(__file__).parent / "results" / "overtaking.json"
SECONDS = 300.0
STEP_TOKENS = 2048


@dataclass(slots=True, eq=False)
class QueuedRequest:
    """A request. Times in seconds."""

    prompt: int
    answer: int
    """Tokens that are generated."""
    reserved: int
    """Tokens that SGLang reserves for the answer."""
    arrival: float
    client: int = 0
    admitted: float = math.inf
    oldest_since: float = math.inf
    """Time at which no older request waited."""
    tokens_left: int = 0
    """Tokens still to generate."""

    @property
    def kv(self) -> int:
        return self.prompt + self.reserved


Order = Callable[[list[QueuedRequest], float], list[QueuedRequest]]


@dataclass(slots=True)
class QueuingServer:
    """Its order, and what it has. ``admitted`` has all admitted jobs, in order."""

    order: Order
    places: int = 8
    pool: int = 1 << 16
    token_s: float = 2e-4
    step_s: float = 0.03
    took: Callable[[Sequence[QueuedRequest]], None] = lambda _jobs: None
    ended: Callable[[QueuedRequest], None] = lambda _job: None
    now: float = 0.0
    waiting: list[QueuedRequest] = field(default_factory=list)
    running: list[QueuedRequest] = field(default_factory=list)
    admitted: list[QueuedRequest] = field(default_factory=list)

    def step(self) -> list[QueuedRequest]:
        """Prefill the requests that may be admitted, else decode a token; return finished jobs."""
        if self.waiting and self.waiting[0].oldest_since == math.inf:
            self.waiting[0].oldest_since = self.now
        batch: list[QueuedRequest] = []
        for job in self.order(list(self.waiting), self.now):
            admitted_jobs = [*self.running, *batch]
            full = (
                len(admitted_jobs) >= self.places
                or sum(one.kv for one in admitted_jobs) + job.kv > self.pool
            )
            if full or sum(one.prompt for one in batch) + job.prompt > STEP_TOKENS:
                break
            batch.append(job)
        if batch:
            self.took(batch)
            self.waiting = [job for job in self.waiting if job not in batch]
            for job in batch:
                job.admitted, job.tokens_left = self.now, job.answer
            self.now += self.token_s * sum(job.prompt for job in batch)
            self.running += batch
            self.admitted += batch
            return []
        self.now += self.step_s
        for job in self.running:
            job.tokens_left -= 1
        finished = [job for job in self.running if job.tokens_left <= 0]
        self.running = [job for job in self.running if job.tokens_left > 0]
        for job in finished:
            self.ended(job)
        return finished


class Bounded:
    """Canopy's order, as the scheduler drives it."""

    def __init__(self, server: QueuingServer) -> None:
        self._server = server
        self.adopts = True
        """Whether the price of answers follows those that finished."""
        prefill = PrefillCost(STEP_TOKENS)
        prefill.adopt((0.0, server.token_s, 0.0, 0.0))
        self.answers = AnswerCost(server.places, server.pool)
        self.answers.adopt(server.step_s)
        self.cost = ServerCost(prefill, self.answers)
        self.order = BoundedShortest(self.cost)
        self._arranged: Arranged[QueuedRequest] = Arranged(self.order, self)
        server.order = lambda queue, _now: self._arranged.arrange(queue)
        server.took, server.ended = self._arranged.admit, self._record_end

    def _record_end(self, job: QueuedRequest) -> None:
        self._arranged.forget(job)
        if self.adopts:
            self.answers.record_answer(job.reserved, job.answer)
            self.answers.adopt(self._server.step_s)

    def budget_s(self, job: QueuedRequest) -> float:
        """Return the overtaking budget of a job that finds no older one."""
        return COST_FACTOR * self.cost.seconds(self.prefill(job, False)) + BASE_BUDGET_S

    def tenant(self, job: QueuedRequest) -> None:
        return None

    def urgency(self, job: QueuedRequest) -> int:
        return 0

    def match(self, job: QueuedRequest) -> None:
        """Do nothing: no prompt has a prefix."""

    def prefill(self, job: QueuedRequest, look_up: bool) -> Prefill:
        return Prefill(job.prompt, reserved=job.reserved)

    def step_tokens(self) -> int:
        return STEP_TOKENS

    def time_s(self) -> float:
        return self._server.now


def first_come(queue: list[QueuedRequest], _now: float) -> list[QueuedRequest]:
    return queue


def shortest(queue: list[QueuedRequest], _now: float) -> list[QueuedRequest]:
    """SGLang's ``shortest-prefill-first``."""
    return sorted(queue, key=lambda job: job.prompt)


SETUPS: dict[str, dict[str, int]] = {
    "8 places, answers of 60 tokens": {},
    "2 places": {"places": 2},
    "8 places, answers of 600 tokens": {"answer": 600},
    "KV of 4,000 tokens, 64 places": {"places": 64, "pool": 4_000},
}
FCFS, SHORTEST, OURS = "fcfs", "shortest-prefill-first", "bounded-shortest"
SHORT, LONG = 40, 900
"""Tokens of a prompt."""


def run(arm: str, places: int = 8, pool: int = 1 << 16, answer: int = 60) -> list[dict[str, Any]]:
    """Serve 24 clients with short prompts and two with long ones; return a row for each kind."""
    server = QueuingServer(shortest if arm == SHORTEST else first_come, places, pool)
    bounded = Bounded(server) if arm == OURS else None
    draw, budgets = random.Random(1), dict[QueuedRequest, float]()

    def send(client: int) -> None:
        tokens = draw.randint(answer // 2, answer * 3 // 2)
        prompt = LONG if client >= 24 else SHORT
        job = QueuedRequest(prompt, tokens, 2 * answer, server.now, client)
        server.waiting.append(job)
        if bounded is not None:
            budgets[job] = bounded.budget_s(job)

    for client in range(26):
        send(client)
    while server.now < SECONDS:
        for job in server.step():
            send(job.client)
    rows = []
    for prompt in (SHORT, LONG):
        jobs = [job for job in (*server.admitted, *server.waiting) if job.prompt == prompt]
        waits = [min(job.admitted, server.now) - job.arrival for job in jobs]
        passed = overtaken_s(server, jobs)
        rows.append(
            {
                "prompt tokens": prompt,
                "order": arm,
                "served": sum(job.admitted <= server.now for job in jobs),
                "median wait, s": statistics.median(waits),
                "longest wait, s": max(waits),
                "overtaken as the oldest, s": max(passed.values(), default=0.0),
                "part of its bound": max(
                    (passed[job] / budgets[job] for job in passed), default=0.0
                )
                if bounded
                else "",
            }
        )
    return rows


def overtaken_s(server: QueuingServer, jobs: Sequence[QueuedRequest]) -> dict[QueuedRequest, float]:
    """Return how long each request was overtaken by the clock since it was the oldest."""
    return {
        job: max(
            (
                one.admitted - job.oldest_since
                for one in server.admitted
                if one.arrival > job.arrival and job.oldest_since <= one.admitted < job.admitted
            ),
            default=0.0,
        )
        for job in jobs
        if job.oldest_since < math.inf
    }


def main() -> None:
    rows = [
        {"set-up": name} | row
        for name, setup in SETUPS.items()
        for arm in (FCFS, SHORTEST, OURS)
        for row in run(arm, **setup)
    ]
    write(OUT, {"kind": "simulated", "rows": rows})


if __name__ == "__main__":
    main()
