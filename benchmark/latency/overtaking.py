"""Simulated: waits of short and long prompts where running requests or KV, not prefill, are the limit.

    python benchmark/latency/overtaking.py

``bounded-shortest`` runs its own code, beside ``fcfs`` and ``shortest-prefill-first``, on a server that
does one prefill or decode step at a time. Clients send their next request when they have their answer,
so the queue never empties. Times are of the simulation's clock. Writes results/overtaking.json.
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

from sglang_canopy.schedule.arranged import ArrangedQueue
from sglang_canopy.schedule.bounded_shortest import BASE_BUDGET_S, COST_FACTOR, BoundedShortest
from sglang_canopy.schedule.cost import AnswerCost, Prefill, PrefillCost, ServerCost

sys.path.insert(0, str(Path(__file__).parents[1]))
from result_file import write

RESULT_FILE = Path(__file__).parent / "results" / "overtaking.json"
SIMULATED_S = 300.0
STEP_TOKENS = 2048


@dataclass(slots=True, eq=False)
class QueuedRequest:
    """A client's request."""

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
    """Answer tokens still to generate."""

    @property
    def kv_tokens(self) -> int:
        return self.prompt_tokens + self.reserved_tokens


Order = Callable[[list[QueuedRequest], float], list[QueuedRequest]]
"""Arranges waiting requests; the second argument is the time in seconds."""


@dataclass(slots=True)
class QueuingServer:
    """A server that admits requests in an order, and the simulation's clock."""

    order: Order
    max_running: int = 8
    pool_tokens: int = 1 << 16
    prefill_token_s: float = 2e-4
    decode_step_s: float = 0.03
    on_admit: Callable[[Sequence[QueuedRequest]], None] = lambda _requests: None
    on_end: Callable[[QueuedRequest], None] = lambda _request: None
    now_s: float = 0.0
    waiting: list[QueuedRequest] = field(default_factory=list)
    running: list[QueuedRequest] = field(default_factory=list)
    admitted: list[QueuedRequest] = field(default_factory=list)
    """All requests admitted so far, in order."""

    def step(self) -> list[QueuedRequest]:
        """Prefill the requests that may be admitted, else decode a token; return finished requests."""
        if self.waiting and self.waiting[0].oldest_since_s == math.inf:
            self.waiting[0].oldest_since_s = self.now_s
        batch: list[QueuedRequest] = []
        for request in self.order(list(self.waiting), self.now_s):
            is_full = len(self.running) + len(batch) >= self.max_running
            kv_tokens = sum(r.kv_tokens for r in (*self.running, *batch, request))
            step_tokens = sum(r.prompt_tokens for r in (*batch, request))
            if is_full or kv_tokens > self.pool_tokens or step_tokens > STEP_TOKENS:
                break
            batch.append(request)
        if batch:
            self.on_admit(batch)
            self.waiting = [request for request in self.waiting if request not in batch]
            for request in batch:
                request.admitted_s, request.tokens_left = self.now_s, request.answer_tokens
            self.now_s += self.prefill_token_s * sum(request.prompt_tokens for request in batch)
            self.running += batch
            self.admitted += batch
            return []
        self.now_s += self.decode_step_s
        for request in self.running:
            request.tokens_left -= 1
        finished = [request for request in self.running if request.tokens_left <= 0]
        self.running = [request for request in self.running if request.tokens_left > 0]
        for request in finished:
            self.on_end(request)
        return finished


class BoundedOrder:
    """``bounded-shortest`` on a ``QueuingServer``, called as the scheduler calls it."""

    def __init__(self, server: QueuingServer) -> None:
        self._server = server
        self.adopts_answers = True
        """Whether the price of answers follows those that finished."""
        prefill = PrefillCost(STEP_TOKENS)
        prefill.adopt((0.0, server.prefill_token_s, 0.0, 0.0))
        self.answers = AnswerCost(server.max_running, server.pool_tokens)
        self.answers.adopt(server.decode_step_s)
        self.cost = ServerCost(prefill, self.answers)
        self.order = BoundedShortest(self.cost)
        self._arranged: ArrangedQueue[QueuedRequest] = ArrangedQueue(self.order, self)
        server.order = lambda queue, _now_s: self._arranged.arrange(queue)
        server.on_admit, server.on_end = self._arranged.admit, self._record_end

    def _record_end(self, request: QueuedRequest) -> None:
        self._arranged.forget(request)
        if self.adopts_answers:
            self.answers.record_answer(request.reserved_tokens, request.answer_tokens)
            self.answers.adopt(self._server.decode_step_s)

    def budget_s(self, request: QueuedRequest) -> float:
        """Return the overtaking budget of a request that finds no older one."""
        return COST_FACTOR * self.cost.seconds(self.prefill(request, False)) + BASE_BUDGET_S

    def tenant(self, request: QueuedRequest) -> None:
        return None

    def urgency(self, request: QueuedRequest) -> int:
        return 0

    def match(self, request: QueuedRequest) -> None:
        """Do nothing: no prompt has a prefix."""

    def prefill(self, request: QueuedRequest, look_up: bool) -> Prefill:
        return Prefill(request.prompt_tokens, reserved=request.reserved_tokens)

    def step_tokens(self) -> int:
        return STEP_TOKENS

    def time_s(self) -> float:
        return self._server.now_s


def first_come(queue: list[QueuedRequest], _now_s: float) -> list[QueuedRequest]:
    return queue


def shortest_prefill(queue: list[QueuedRequest], _now_s: float) -> list[QueuedRequest]:
    """SGLang's ``shortest-prefill-first``."""
    return sorted(queue, key=lambda request: request.prompt_tokens)


SETUPS: dict[str, dict[str, int]] = {
    "8 places, answers of 60 tokens": {},
    "2 places": {"max_running": 2},
    "8 places, answers of 600 tokens": {"answer_tokens": 600},
    "KV of 4,000 tokens, 64 places": {"max_running": 64, "pool_tokens": 4_000},
}
FCFS, SHORTEST, OURS = "fcfs", "shortest-prefill-first", "bounded-shortest"
SHORT_PROMPT_TOKENS, LONG_PROMPT_TOKENS = 40, 900
SHORT_CLIENTS, LONG_CLIENTS = 24, 2
"""Clients with short prompts, and with long prompts."""


def run_order(
    arm: str, max_running: int = 8, pool_tokens: int = 1 << 16, answer_tokens: int = 60
) -> list[dict[str, Any]]:
    """Serve all clients under an order; return a row for short prompts and a row for long prompts."""
    order = shortest_prefill if arm == SHORTEST else first_come
    server = QueuingServer(order, max_running, pool_tokens)
    bounded = BoundedOrder(server) if arm == OURS else None
    rng, budgets_s = random.Random(1), dict[QueuedRequest, float]()

    def send(client: int) -> None:
        drawn_tokens = rng.randint(answer_tokens // 2, answer_tokens * 3 // 2)
        prompt_tokens = LONG_PROMPT_TOKENS if client >= SHORT_CLIENTS else SHORT_PROMPT_TOKENS
        tokens = (prompt_tokens, drawn_tokens, 2 * answer_tokens)
        request = QueuedRequest(*tokens, server.now_s, client)
        server.waiting.append(request)
        if bounded is not None:
            budgets_s[request] = bounded.budget_s(request)

    for client in range(SHORT_CLIENTS + LONG_CLIENTS):
        send(client)
    while server.now_s < SIMULATED_S:
        for request in server.step():
            send(request.client)
    rows = []
    for prompt_tokens in (SHORT_PROMPT_TOKENS, LONG_PROMPT_TOKENS):
        received = (*server.admitted, *server.waiting)
        requests = [r for r in received if r.prompt_tokens == prompt_tokens]
        waits_s = [min(r.admitted_s, server.now_s) - r.arrival_s for r in requests]
        overtaken_s = overtaken_seconds(server, requests)
        shares_of_bound = (s / budgets_s[r] for r, s in overtaken_s.items())
        rows.append(
            {
                "prompt tokens": prompt_tokens,
                "order": arm,
                "served": sum(r.admitted_s <= server.now_s for r in requests),
                "median wait, s": statistics.median(waits_s),
                "longest wait, s": max(waits_s),
                "overtaken as the oldest, s": max(overtaken_s.values(), default=0.0),
                "part of its bound": max(shares_of_bound, default=0.0) if bounded else "",
            }
        )
    return rows


def overtaken_seconds(
    server: QueuingServer, requests: Sequence[QueuedRequest]
) -> dict[QueuedRequest, float]:
    """Return for how many seconds each request was overtaken since it was the oldest."""
    return {
        request: max(
            (
                overtaker.admitted_s - request.oldest_since_s
                for overtaker in server.admitted
                if overtaker.arrival_s > request.arrival_s
                and request.oldest_since_s <= overtaker.admitted_s < request.admitted_s
            ),
            default=0.0,
        )
        for request in requests
        if request.oldest_since_s < math.inf
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
