"""Queue of the requests of one share and one priority, by net cost."""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from sglang_canopy.schedule.age_order import AgeOrder
from sglang_canopy.schedule.cost import Prefill
from sglang_canopy.schedule.fair_shares import Share

Price = Callable[[Prefill], tuple[float, float]]
"""Returns the cost and the net cost, in seconds."""
BUDGET_HEAD = 32
"""Further requests sorted per call once budgets restrict the order."""


@dataclass(slots=True, eq=False)
class WaitingRequest:
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
    cost_s: float
    net_cost_s: float
    """The lowest goes first, within the budgets."""
    budget_s: float
    """Overtaking budget at arrival."""
    budget_left_s: float
    """Unused budget; valid only while outside a queue."""
    request: Any = None
    """The scheduler's request."""
    position: int = -1
    """Index in ``age_order``."""
    age_order: AgeOrder | None = None
    """The queue's ``AgeOrder`` when ``position`` was assigned, ``None`` before. After a rebuild
    ``position`` is stale."""
    became_oldest_at: float | None = None
    """Time at which it became the oldest of its queue."""

    @property
    def rank(self) -> tuple[float, int]:
        return self.net_cost_s, self.number


class CostQueue:
    """Requests sorted by net cost, with their overtaking budgets."""

    def __init__(self) -> None:
        self.requests: dict[int, WaitingRequest] = {}
        """Keyed by arrival number."""
        self.by_net_cost: list[tuple[float, int, WaitingRequest]] = []
        self.age_order = AgeOrder()
        self.arrival_by_position: list[int] = []
        """Arrival numbers, the oldest first."""
        self.chunked_prompt: WaitingRequest | None = None
        """The prompt now prefilled in chunks. Requests that share its steps may overtake it
        within its budget."""

    def allows_every_order(self) -> bool:
        """Return whether no order of the requests overdraws a budget."""
        total_cost_s = sum(waiting.cost_s for waiting in self.requests.values())
        return self.age_order.least_allowance() >= total_cost_s

    def add(self, waiting: WaitingRequest) -> None:
        """Add the youngest request, or requeue a retracted one."""
        waiting.became_oldest_at = None  # a retracted request was running meanwhile
        self.requests[waiting.number] = waiting
        insort(self.by_net_cost, (*waiting.rank, waiting))
        if waiting.age_order is None and not self.age_order.is_full:
            waiting.age_order = self.age_order
            waiting.position = self.age_order.append(waiting.cost_s, waiting.budget_left_s)
            self.arrival_by_position.append(waiting.number)
        else:
            self._restore(waiting, waiting.cost_s)

    def _restore(self, waiting: WaitingRequest, cost: float) -> None:
        """Insert a request that is not the youngest at its position by age."""
        if waiting.age_order is self.age_order:
            self.age_order.set_cost(waiting.position, cost)
            self.age_order.set_allowance(waiting.position, waiting.budget_left_s)
        else:
            self._rebuild(waiting)

    def remove(self, waiting: WaitingRequest) -> None:
        del self.requests[waiting.number]
        self._suspend_budget(waiting)
        self.age_order.set_cost(waiting.position, math.inf)
        del self.by_net_cost[bisect_left(self.by_net_cost, waiting.rank)]

    def _suspend_budget(self, waiting: WaitingRequest) -> None:
        """Save the unused budget and stop enforcing it."""
        waiting.budget_left_s = self.age_order.allowance(waiting.position)
        self.age_order.set_allowance(waiting.position, math.inf)

    def update(self, waiting: WaitingRequest, prefill: Prefill, price: Price) -> None:
        """Update the costs of ``waiting`` to those of ``prefill``."""
        waiting.prefill, costs_s = prefill, price(prefill)
        if costs_s != (waiting.cost_s, waiting.net_cost_s):
            del self.by_net_cost[bisect_left(self.by_net_cost, waiting.rank)]
            waiting.cost_s, waiting.net_cost_s = costs_s
            insort(self.by_net_cost, (*waiting.rank, waiting))
            self.age_order.set_cost(waiting.position, waiting.cost_s)

    def set_time(self, now: float) -> None:
        """End the overtaking of the oldest request after its budget in seconds of the clock."""
        if not self.requests:
            return
        oldest = self.requests[min(self.requests)]
        if oldest.became_oldest_at is None:
            oldest.became_oldest_at = now
        elif now - oldest.became_oldest_at > oldest.budget_s:
            self.age_order.set_allowance(
                oldest.position, min(self.age_order.allowance(oldest.position), 0.0)
            )

    def admit(self, waiting: WaitingRequest) -> None:
        """Admit a request, charging the budgets of all older requests."""
        self.age_order.charge_older(waiting.position, waiting.cost_s)
        self.remove(waiting)

    def set_chunked_prompt(self, prompt: WaitingRequest | None) -> None:
        """Set the chunked prefill, whose budget stays enforced; ``None`` clears it."""
        if self.chunked_prompt is not None:
            self._suspend_budget(self.chunked_prompt)
        self.chunked_prompt = prompt
        if prompt is not None:
            self._restore(prompt, math.inf)

    def walk(self) -> Iterator[WaitingRequest]:
        """Yield requests in admission order.

        Does not change the queue. The tail, beyond ``BUDGET_HEAD``, is in order of arrival.
        """
        spare_s, head = self.age_order.least_allowance(), list[WaitingRequest]()
        for _, _, waiting in self.by_net_cost:
            if waiting.cost_s > spare_s:
                break
            spare_s -= waiting.cost_s
            head.append(waiting)
            yield waiting
        if len(head) < len(self.requests):
            for waiting in self._walk_within_budgets(head):
                head.append(waiting)
                yield waiting
            tail = self.requests.keys() - {waiting.number for waiting in head}
            yield from map(self.requests.__getitem__, sorted(tail))

    def _walk_within_budgets(self, admitted: Iterable[WaitingRequest]) -> Iterator[WaitingRequest]:
        """Yield the next requests after ``admitted`` when budgets restrict the order."""
        trial, chosen = self.age_order, list(admitted)
        for _ in range(BUDGET_HEAD):
            if chosen and trial is self.age_order:  # copy late: most callers take only the first
                trial = self.age_order.copy()
            for waiting in chosen:
                simulate_admission(trial, waiting)
            position = trial.cheapest()
            if position < 0:
                return
            chosen = [self.requests[self.arrival_by_position[position]]]
            yield chosen[0]

    def reprice(self, price: Price) -> None:
        for waiting in self.requests.values():
            waiting.cost_s, waiting.net_cost_s = price(waiting.prefill)
        self.by_net_cost = sorted((*waiting.rank, waiting) for waiting in self.requests.values())
        self._rebuild()

    def _rebuild(self, new: WaitingRequest | None = None) -> None:
        """Reassign all positions, including one for ``new``."""
        chunked = [] if self.chunked_prompt is None else [self.chunked_prompt]
        members = sorted([*self.requests.values(), *chunked], key=lambda member: member.number)
        budgets = [
            member.budget_left_s if member is new else self.age_order.allowance(member.position)
            for member in members
        ]
        costs = [math.inf if member is self.chunked_prompt else member.cost_s for member in members]
        self.age_order = AgeOrder(costs, budgets)
        self.arrival_by_position = [member.number for member in members]
        for position, member in enumerate(members):
            member.position, member.age_order = position, self.age_order


def simulate_admission(trial: AgeOrder, waiting: WaitingRequest) -> None:
    trial.charge_older(waiting.position, waiting.cost_s)
    trial.set_cost(waiting.position, math.inf)
    trial.set_allowance(waiting.position, math.inf)
