"""Queue of the requests of one share and one priority, by net cost."""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from sglang_canopy.schedule.cost import Prefill
from sglang_canopy.schedule.fair_shares import Share
from sglang_canopy.schedule.passing import Passing

Price = Callable[[Prefill], tuple[float, float]]
"""Returns the cost and the net cost, in seconds."""
TIGHT_HEAD = 32
"""Requests sorted per call once budgets restrict the order."""


@dataclass(slots=True, eq=False)
class Waiting:
    """A waiting request. Times in seconds."""

    number: int
    """Order of arrival, unique."""
    tenant: Hashable
    """The tenant that is charged."""
    share: Share
    """The share that it is charged to, fixed on arrival."""
    urgency: int
    """SGLang's priority; higher values are always admitted first."""
    prefill: Prefill
    cost: float
    net_cost: float
    """The lowest is first, by the budgets."""
    budget_left_s: float = math.inf
    """Unused budget; valid only while outside a queue."""
    position: int = -1
    """Index in ``age_order``."""
    age_order: Passing | None = None
    """The queue's ``Passing`` when ``position`` was assigned; after a rebuild ``position`` is stale."""
    budget_s: float = math.inf
    """Overtaking budget at arrival, in seconds."""
    oldest_since: float | None = None
    """Time at which it became the oldest of its queue."""
    request: Any = None
    """The scheduler's request."""

    @property
    def rank(self) -> tuple[float, int]:
        return self.net_cost, self.number


class CostQueue:
    """Requests sorted by net cost, with their overtaking budgets."""

    def __init__(self) -> None:
        self.requests: dict[int, Waiting] = {}
        """Keyed by arrival number."""
        self.by_net_cost: list[tuple[float, int, Waiting]] = []
        self.passing = Passing()
        self.arrival_by_position: list[int] = []
        """Arrival numbers, the oldest first."""
        self.chunked_prompt: Waiting | None = None
        """The prompt now prefilled in chunks. Requests that share its steps may overtake it
        within its budget."""
        self.work = 0.0
        """Total cost, in seconds."""
        self.uncached_tokens = 0

    def add(self, waiting: Waiting, youngest: bool) -> None:
        """Add a new request, or requeue a retracted one (``youngest=False``)."""
        waiting.oldest_since = None  # a retracted request was running meanwhile
        self.requests[waiting.number] = waiting
        insort(self.by_net_cost, (*waiting.rank, waiting))
        self.work += waiting.cost
        self.uncached_tokens += waiting.prefill.uncached
        if youngest and not self.passing.full:
            waiting.age_order = self.passing
            waiting.position = self.passing.append(waiting.cost, waiting.budget_left_s)
            self.arrival_by_position.append(waiting.number)
        else:
            self._restore(waiting, waiting.cost)

    def _restore(self, waiting: Waiting, cost: float) -> None:
        """Insert a request that is not the youngest at its position by age."""
        if waiting.age_order is self.passing:
            self.passing.set_cost(waiting.position, cost)
            self.passing.set_allowance(waiting.position, waiting.budget_left_s)
        else:
            self._rebuild(waiting)

    def remove(self, waiting: Waiting) -> None:
        del self.requests[waiting.number]
        self._suspend_budget(waiting)
        self.passing.set_cost(waiting.position, math.inf)
        del self.by_net_cost[bisect_left(self.by_net_cost, waiting.rank)]
        self.uncached_tokens -= waiting.prefill.uncached
        self.work = self.work - waiting.cost if self.requests else 0.0

    def _suspend_budget(self, waiting: Waiting) -> None:
        """Save the unused budget and stop enforcing it."""
        waiting.budget_left_s = self.passing.allowance(waiting.position)
        self.passing.set_allowance(waiting.position, math.inf)

    def update(self, waiting: Waiting, prefill: Prefill, price: Price) -> None:
        self.uncached_tokens += prefill.uncached - waiting.prefill.uncached
        waiting.prefill, (cost, net_cost) = prefill, price(prefill)
        if (cost, net_cost) != (waiting.cost, waiting.net_cost):
            del self.by_net_cost[bisect_left(self.by_net_cost, waiting.rank)]
            self.work += cost - waiting.cost
            waiting.cost, waiting.net_cost = cost, net_cost
            insort(self.by_net_cost, (*waiting.rank, waiting))
            self.passing.set_cost(waiting.position, cost)

    def set_time(self, now: float) -> None:
        """End the overtaking of the oldest request after its budget in seconds of the clock."""
        if not self.requests:
            return
        oldest = self.requests[min(self.requests)]
        if oldest.oldest_since is None:
            oldest.oldest_since = now
        elif now - oldest.oldest_since > oldest.budget_s:
            self.passing.set_allowance(
                oldest.position, min(self.passing.allowance(oldest.position), 0.0)
            )

    def admit(self, waiting: Waiting) -> None:
        """Admit a request, charging the budgets of all older requests."""
        self.passing.pass_by(waiting.position, waiting.cost)
        self.remove(waiting)

    def set_chunked_prompt(self, prompt: Waiting | None) -> None:
        """Set the chunked prefill, whose budget stays enforced; ``None`` clears it."""
        if self.chunked_prompt is not None:
            self._suspend_budget(self.chunked_prompt)
        self.chunked_prompt = prompt
        if prompt is not None:
            self._restore(prompt, math.inf)

    def walk(self) -> Iterator[Waiting]:
        """Yield requests in admission order.

        Does not change the queue. The tail, beyond ``TIGHT_HEAD``, is in order of arrival.
        """
        spare, head = self.passing.least_allowance(), list[Waiting]()
        for _, _, waiting in self.by_net_cost:
            if waiting.cost > spare:
                break
            spare -= waiting.cost
            head.append(waiting)
            yield waiting
        if len(head) < len(self.requests):
            for waiting in self._walk_within_budgets(head):
                head.append(waiting)
                yield waiting
            tail = self.requests.keys() - {waiting.number for waiting in head}
            yield from map(self.requests.__getitem__, sorted(tail))

    def _walk_within_budgets(self, admitted: Iterable[Waiting]) -> Iterator[Waiting]:
        """Yield the next requests after ``admitted`` when budgets restrict the order."""
        trial, chosen = self.passing, list(admitted)
        for _ in range(TIGHT_HEAD):
            if chosen and trial is self.passing:  # copy late: most callers take only the first
                trial = self.passing.copy()
            for waiting in chosen:
                simulate_admission(trial, waiting)
            position = trial.shortest()
            if position < 0:
                return
            chosen = [self.requests[self.arrival_by_position[position]]]
            yield chosen[0]

    def reprice(self, price: Price) -> None:
        for waiting in self.requests.values():
            waiting.cost, waiting.net_cost = price(waiting.prefill)
        self.by_net_cost = sorted((*waiting.rank, waiting) for waiting in self.requests.values())
        self.work = sum(waiting.cost for waiting in self.requests.values())
        self._rebuild()

    def _rebuild(self, new: Waiting | None = None) -> None:
        """Reassign all positions, including one for ``new``."""
        chunked = [] if self.chunked_prompt is None else [self.chunked_prompt]
        members = sorted([*self.requests.values(), *chunked], key=lambda member: member.number)
        budgets = [
            member.budget_left_s if member is new else self.passing.allowance(member.position)
            for member in members
        ]
        costs = [math.inf if member is self.chunked_prompt else member.cost for member in members]
        self.passing = Passing(costs, budgets)
        self.arrival_by_position = [member.number for member in members]
        for position, member in enumerate(members):
            member.position, member.age_order = position, self.passing


def simulate_admission(trial: Passing, waiting: Waiting) -> None:
    trial.pass_by(waiting.position, waiting.cost)
    trial.set_cost(waiting.position, math.inf)
    trial.set_allowance(waiting.position, math.inf)
