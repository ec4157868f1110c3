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

RESULT_FILE = Path(__file__).parent / "results" / "overtaking.json"
SIMULATED_S = 300.0
STEP_TOKENS = 2048


@dataclass(slots=True, eq=False)
class QueuedRequest:
    """A request. Times in seconds."""

    prompt_tokens: int
    answer_tokens: int
    """Tokens that are generated."""
    reserved_tokens: int
    """Tokens that SGLang reserves for the answer."""
    arrival_s: float
    client: int = 0
    admitted_s: float = math.inf
    oldest_since_s: float = math.inf
    """Time at which no older request waited."""
    tokens_left: int = 0
    """Tokens still to generate."""

    @property
    def kv_tokens(self) -> int:
        return self.prompt_tokens + self.reserved_tokens


Order = Callable[[list[QueuedRequest], float], list[QueuedRequest]]


@dataclass(slots=True)
class QueuingServer:
    """Its order, and what it has. ``admitted`` has all admitted jobs, in order."""

    order: Order
    places: int = 8
    pool_tokens: int = 1 << 16
    token_s: float = 2e-4
    step_s: float = 0.03
    on_admit: Callable[[Sequence[QueuedRequest]], None] = lambda _jobs: None
    on_end: Callable[[QueuedRequest], None] = lambda _job: None
    now_s: float = 0.0
    waiting: list[QueuedRequest] = field(default_factory=list)
    running: list[QueuedRequest] = field(default_factory=list)
    admitted: list[QueuedRequest] = field(default_factory=list)

    def step(self) -> list[QueuedRequest]:
        """Prefill the requests that may be admitted, else decode a token; return finished jobs."""
        if self.waiting and self.waiting[0].oldest_since_s == math.inf:
            self.waiting[0].oldest_since_s = self.now_s
        batch: list[QueuedRequest] = []
        for job in self.order(list(self.waiting), self.now_s):
            admitted_jobs = [*self.running, *batch]
            full = (
                len(admitted_jobs) >= self.places
                or sum(one.kv_tokens for one in admitted_jobs) + job.kv_tokens > self.pool_tokens
            )
            if full or sum(one.prompt_tokens for one in batch) + job.prompt_tokens > STEP_TOKENS:
                break
            batch.append(job)
        if batch:
            self.on_admit(batch)
            self.waiting = [job for job in self.waiting if job not in batch]
            for job in batch:
                job.admitted_s, job.tokens_left = self.now_s, job.answer_tokens
            self.now_s += self.token_s * sum(job.prompt_tokens for job in batch)
            self.running += batch
            self.admitted += batch
            return []
        self.now_s += self.step_s
        for job in self.running:
            job.tokens_left -= 1
        finished = [job for job in self.running if job.tokens_left <= 0]
        self.running = [job for job in self.running if job.tokens_left > 0]
        for job in finished:
            self.on_end(job)
        return finished


class Bounded:
    """Canopy's order, as the scheduler drives it."""

    def __init__(self, server: QueuingServer) -> None:
        self._server = server
        self.adopts_answers = True
        """Whether the price of answers follows those that finished."""
        prefill = PrefillCost(STEP_TOKENS)
        prefill.adopt((0.0, server.token_s, 0.0, 0.0))
        self.answers = AnswerCost(server.places, server.pool_tokens)
        self.answers.adopt(server.step_s)
        self.cost = ServerCost(prefill, self.answers)
        self.order = BoundedShortest(self.cost)
        self._arranged: Arranged[QueuedRequest] = Arranged(self.order, self)
        server.order = lambda queue, _now: self._arranged.arrange(queue)
        server.on_admit, server.on_end = self._arranged.admit, self._record_end

    def _record_end(self, job: QueuedRequest) -> None:
        self._arranged.forget(job)
        if self.adopts_answers:
            self.answers.record_answer(job.reserved_tokens, job.answer_tokens)
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
        return Prefill(job.prompt_tokens, reserved=job.reserved_tokens)

    def step_tokens(self) -> int:
        return STEP_TOKENS

    def time_s(self) -> float:
        return self._server.now_s


def first_come(queue: list[QueuedRequest], _now: float) -> list[QueuedRequest]:
    return queue


def shortest(queue: list[QueuedRequest], _now: float) -> list[QueuedRequest]:
    """SGLang's ``shortest-prefill-first``."""
    return sorted(queue, key=lambda job: job.prompt_tokens)


SETUPS: dict[str, dict[str, int]] = {
    "8 places, answers of 60 tokens": {},
    "2 places": {"places": 2},
    "8 places, answers of 600 tokens": {"answer_tokens": 600},
    "KV of 4,000 tokens, 64 places": {"places": 64, "pool_tokens": 4_000},
}
FCFS, SHORTEST, OURS = "fcfs", "shortest-prefill-first", "bounded-shortest"
SHORT_TOKENS, LONG_TOKENS = 40, 900
"""Tokens of a prompt."""


def run_order(
    arm: str, places: int = 8, pool_tokens: int = 1 << 16, answer_tokens: int = 60
) -> list[dict[str, Any]]:
    """Serve 24 clients with short prompts and two with long ones; return a row for each kind."""
    server = QueuingServer(shortest if arm == SHORTEST else first_come, places, pool_tokens)
    bounded = Bounded(server) if arm == OURS else None
    rng, budgets_s = random.Random(1), dict[QueuedRequest, float]()

    def send(client: int) -> None:
        tokens = rng.randint(answer_tokens // 2, answer_tokens * 3 // 2)
        prompt = LONG_TOKENS if client >= 24 else SHORT_TOKENS
        job = QueuedRequest(prompt, tokens, 2 * answer_tokens, server.now_s, client)
        server.waiting.append(job)
        if bounded is not None:
            budgets_s[job] = bounded.budget_s(job)

    for client in range(26):
        send(client)
    while server.now_s < SIMULATED_S:
        for job in server.step():
            send(job.client)
    rows = []
    for prompt in (SHORT_TOKENS, LONG_TOKENS):
        jobs = [job for job in (*server.admitted, *server.waiting) if job.prompt_tokens == prompt]
        waits = [min(job.admitted_s, server.now_s) - job.arrival_s for job in jobs]
        overtaken = overtaken_s(server, jobs)
        rows.append(
            {
                "prompt tokens": prompt,
                "order": arm,
                "served": sum(job.admitted_s <= server.now_s for job in jobs),
                "median wait, s": statistics.median(waits),
                "longest wait, s": max(waits),
                "overtaken as the oldest, s": max(overtaken.values(), default=0.0),
                "part of its bound": max(
                    (overtaken[job] / budgets_s[job] for job in overtaken), default=0.0
                )
                if bounded
                else "",
            }
        )
    return rows


def overtaken_s(server: QueuingServer, jobs: Sequence[QueuedRequest]) -> dict[QueuedRequest, float]:
    """Return for how long each request was overtaken since it was the oldest, in seconds."""
    return {
        job: max(
            (
                overtaker.admitted_s - job.oldest_since_s
                for overtaker in server.admitted
                if overtaker.arrival_s > job.arrival_s
                and job.oldest_since_s <= overtaker.admitted_s < job.admitted_s
            ),
            default=0.0,
        )
        for job in jobs
        if job.oldest_since_s < math.inf
    }


def main() -> None:
    rows = [
        {"set-up": name} | row
        for name, setup in SETUPS.items()
        for arm in (FCFS, SHORTEST, OURS)
        for row in run_order(arm, **setup)
    ]
    write(RESULT_FILE, {"kind": "simulated", "rows": rows})


if __name__ == "__main__":
    main()
