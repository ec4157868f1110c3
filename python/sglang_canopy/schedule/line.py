"""Queue of the requests of one turn and one priority."""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from sglang_canopy.schedule.fair_shares import Turn
from sglang_canopy.schedule.passing import Passing
from sglang_canopy.schedule.prefill_cost import Cost, Prefill
from sglang_canopy.tenant import Party

TIGHT_PLACES = 32
"""Requests sorted per call once budgets restrict the order."""


@dataclass(slots=True, eq=False)
class Waiting:
    """A waiting request. Times in seconds."""

    number: int
    """Order of arrival, unique."""
    tenant: Party
    turn: Turn
    """The turn it is charged to, fixed on arrival."""
    urgency: int
    """SGLang's priority; higher values are always admitted first."""
    prefill: Prefill
    cost: float
    left: float = math.inf
    """Unused budget, in seconds, valid only while outside a line."""
    place: int = -1
    """Index in ``places``."""
    places: Passing | None = None
    """The line's ``Passing`` when ``place`` was assigned; after a rebuild ``place`` is stale."""
    budget_s: float = math.inf
    """Overtaking budget at arrival, in seconds."""
    oldest_since: float | None = None
    """Time at which it became the oldest of its line."""
    about: Any = None
    """The scheduler's request."""

    @property
    def rank(self) -> tuple[float, int]:
        return self.cost, self.number


class Line:
    """Requests sorted by cost, with their overtaking budgets."""

    __slots__ = ("at", "by_cost", "chunk", "passing", "requests", "work")

    def __init__(self) -> None:
        self.requests: dict[int, Waiting] = {}
        """Keyed by arrival number."""
        self.by_cost: list[tuple[float, int, Waiting]] = []
        self.passing = Passing()
        self.at: list[int] = []
        """Arrival numbers by place."""
        self.chunk: Waiting | None = None
        """The chunked prefill, which sharers of its steps may overtake within its budget."""
        self.work = 0.0
        """Total cost, in seconds."""

    def add(self, waiting: Waiting, youngest: bool) -> None:
        """Add a new request, or requeue a retracted one (``youngest=False``)."""
        waiting.oldest_since = None  # a retracted request was running meanwhile
        self.requests[waiting.number] = waiting
        insort(self.by_cost, (*waiting.rank, waiting))
        self.work += waiting.cost
        if youngest and not self.passing.full:
            waiting.places = self.passing
            waiting.place = self.passing.append(waiting.cost, waiting.left)
            self.at.append(waiting.number)
        else:
            self._restore(waiting, waiting.cost)

    def _restore(self, waiting: Waiting, cost: float) -> None:
        """Insert a request that is not the youngest at its place by age."""
        if waiting.places is self.passing:
            self.passing.set_cost(waiting.place, cost)
            self.passing.set_allowance(waiting.place, waiting.left)
        else:
            self._rebuild(waiting)

    def remove(self, waiting: Waiting) -> bool:
        """Return False if the request was not queued."""
        if self.requests.pop(waiting.number, None) is None:
            return False
        self._suspend_budget(waiting)
        self.passing.set_cost(waiting.place, math.inf)
        del self.by_cost[bisect_left(self.by_cost, waiting.rank)]
        self.work = self.work - waiting.cost if self.requests else 0.0
        return True

    def _suspend_budget(self, waiting: Waiting) -> None:
        """Save the unused budget and stop enforcing it."""
        waiting.left = self.passing.allowance(waiting.place)
        self.passing.set_allowance(waiting.place, math.inf)

    def update(self, waiting: Waiting, prefill: Prefill, cost: float) -> None:
        waiting.prefill = prefill
        if cost != waiting.cost:
            del self.by_cost[bisect_left(self.by_cost, waiting.rank)]
            self.work += cost - waiting.cost
            waiting.cost = cost
            insort(self.by_cost, (*waiting.rank, waiting))
            self.passing.set_cost(waiting.place, cost)

    def set_time(self, now: float) -> None:
        """End the overtaking of the oldest request after its budget in seconds of the clock."""
        if not self.requests:
            return
        oldest = self.requests[min(self.requests)]
        if oldest.oldest_since is None:
            oldest.oldest_since = now
        elif now - oldest.oldest_since > oldest.budget_s:
            self.passing.set_allowance(oldest.place, min(self.passing.allowance(oldest.place), 0.0))

    def admit(self, waiting: Waiting) -> None:
        """Admit a request, charging the budgets of all older requests."""
        self.passing.pass_by(waiting.place, waiting.cost)
        self.remove(waiting)

    def let_pass(self, chunk: Waiting | None) -> None:
        """Set the chunked prefill, whose budget stays enforced; ``None`` clears it."""
        if self.chunk is not None:
            self._suspend_budget(self.chunk)
        self.chunk = chunk
        if chunk is not None:
            self._restore(chunk, math.inf)

    def walk(self, gone: Sequence[Waiting] = ()) -> Iterator[Waiting]:
        """Yield requests in admission order, assuming ``gone`` is admitted first.

        Does not change the line. The tail, beyond ``TIGHT_PLACES``, is in order of arrival.
        """
        spare, taken = self._allowances_after(gone).least_allowance(), {one.number for one in gone}
        head = list(gone)
        for cost, number, waiting in self.by_cost:
            if number in taken:
                continue
            if cost > spare:
                break
            spare -= cost
            head.append(waiting)
            taken.add(number)
            yield waiting
        if len(taken) < len(self.requests):
            for waiting in self._walk_within_budgets(head):
                taken.add(waiting.number)
                yield waiting
            yield from (
                self.requests[number]
                for number in self.at
                if number in self.requests and number not in taken
            )

    def _allowances_after(self, gone: Sequence[Waiting]) -> Passing:
        if not gone:
            return self.passing
        trial = self.passing.copy()
        for waiting in gone:
            go(trial, waiting)
        return trial

    def _walk_within_budgets(self, gone: Iterable[Waiting]) -> Iterator[Waiting]:
        """Yield the next requests after ``gone`` when budgets restrict the order."""
        trial, chosen = self.passing, list(gone)
        for _ in range(TIGHT_PLACES):
            if chosen and trial is self.passing:  # copy late: most callers take only the first
                trial = self.passing.copy()
            for waiting in chosen:
                go(trial, waiting)
            place = trial.shortest()
            if place < 0:
                return
            chosen = [self.requests[self.at[place]]]
            yield chosen[0]

    def reprice(self, cost: Cost) -> None:
        for waiting in self.requests.values():
            waiting.cost = cost.seconds(waiting.prefill)
        self.by_cost = sorted((*one.rank, one) for one in self.requests.values())
        self.work = sum(one.cost for one in self.requests.values())
        self._rebuild()

    def _rebuild(self, new: Waiting | None = None) -> None:
        """Reassign all places, including one for ``new``."""
        here = [] if self.chunk is None else [self.chunk]
        members = sorted([*self.requests.values(), *here], key=number_of)
        left = [one.left if one is new else self.passing.allowance(one.place) for one in members]
        costs = [math.inf if one is self.chunk else one.cost for one in members]
        self.passing = Passing(costs, left)
        self.at = [one.number for one in members]
        for place, one in enumerate(members):
            one.place, one.places = place, self.passing


def go(trial: Passing, waiting: Waiting) -> None:
    trial.pass_by(waiting.place, waiting.cost)
    trial.set_cost(waiting.place, math.inf)
    trial.set_allowance(waiting.place, math.inf)


def number_of(waiting: Waiting) -> int:
    return waiting.number
