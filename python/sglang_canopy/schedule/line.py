"""The waiting requests of one turn and one urgency: by cost, and with what may still pass each."""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from sglang_canopy.schedule.fair_shares import Turn
from sglang_canopy.schedule.passing import Passing
from sglang_canopy.schedule.prefill_cost import Cost, Prefill

TIGHT_PLACES = 32
"""Requests that are worked out once budgets decide."""


@dataclass(slots=True, eq=False)
class Waiting:
    """A request in the queue. Times in seconds."""

    number: int
    """Order of arrival."""
    tenant: str | None
    turn: Turn
    """Under which it is served: its tenant's when it came."""
    urgency: int
    """Higher goes first, always (SGLang's priority)."""
    prefill: Prefill
    cost: float
    left: float = math.inf
    """Of its budget, while it is not in a line."""
    place: int = -1
    """In ``places``."""
    places: Passing | None = None
    """Its line's when it was given its place, which is its own as long as the line has no others."""
    about: Any = None
    """The caller's own."""

    @property
    def rank(self) -> tuple[float, int]:
        return self.cost, self.number


class Line:
    """The requests of one turn and one urgency."""

    __slots__ = ("at", "by_cost", "chunk", "passing", "requests", "work")

    def __init__(self) -> None:
        self.requests: dict[int, Waiting] = {}
        """By number."""
        self.by_cost: list[tuple[float, int, Waiting]] = []
        self.passing = Passing()
        self.at: list[int] = []
        """Numbers by place."""
        self.chunk: Waiting | None = None
        """In the middle of its chunks: others may pass it for what is left of its budget."""
        self.work = 0.0
        """Seconds that all requests cost."""

    def add(self, waiting: Waiting, youngest: bool) -> None:
        """One that came, or one that came back, which may be older than others."""
        self.requests[waiting.number] = waiting
        insort(self.by_cost, (*waiting.rank, waiting))
        self.work += waiting.cost
        if youngest and not self.passing.full:
            waiting.places = self.passing
            waiting.place = self.passing.append(waiting.cost, waiting.left)
            self.at.append(waiting.number)
        else:
            self._enter(waiting, waiting.cost)

    def _enter(self, waiting: Waiting, cost: float) -> None:
        """One that is older than others has a place between them."""
        if waiting.places is self.passing:
            self.passing.set_cost(waiting.place, cost)
            self.passing.set_allowance(waiting.place, waiting.left)
        else:
            self._rebuild(waiting)

    def remove(self, waiting: Waiting) -> bool:
        """Take one out; false if it was not in."""
        if self.requests.pop(waiting.number, None) is None:
            return False
        self._leave(waiting)
        self.passing.set_cost(waiting.place, math.inf)
        del self.by_cost[bisect_left(self.by_cost, waiting.rank)]
        self.work = self.work - waiting.cost if self.requests else 0.0
        return True

    def _leave(self, waiting: Waiting) -> None:
        """It holds up nobody from now on; what is left of its budget is noted."""
        waiting.left = self.passing.allowance(waiting.place)
        self.passing.set_allowance(waiting.place, math.inf)

    def update(self, waiting: Waiting, prefill: Prefill, cost: float) -> None:
        """What is cached of one has changed."""
        waiting.prefill = prefill
        if cost != waiting.cost:
            del self.by_cost[bisect_left(self.by_cost, waiting.rank)]
            self.work += cost - waiting.cost
            waiting.cost = cost
            insort(self.by_cost, (*waiting.rank, waiting))
            self.passing.set_cost(waiting.place, cost)

    def let_in(self, waiting: Waiting) -> None:
        """One of the line is computed from now on."""
        self.passing.pass_by(waiting.place, waiting.cost)
        self.remove(waiting)

    def let_pass(self, chunk: Waiting | None) -> None:
        """``chunk``, of this line, is in the middle of its chunks; ``None``: nobody is."""
        if self.chunk is not None:
            self._leave(self.chunk)
        self.chunk = chunk
        if chunk is not None:
            self._enter(chunk, math.inf)

    def before(self, cost: float, number: int) -> float:
        """Seconds of work here that would be let in before a request of such a cost and number if
        nobody came any more: of shorter ones, and of older ones that it may not pass."""
        shorter = bisect_left(self.by_cost, (cost, number))  # type: ignore[type-var]
        found = sum(row[0] for row in self.by_cost[:shorter])
        if self.passing.least_allowance() < cost:
            for _, one_number, one in self.by_cost[shorter:]:
                if one_number < number and self.passing.allowance(one.place) < cost:
                    found += one.cost
        return found

    def walk(self, gone: Sequence[Waiting] = ()) -> Iterator[Waiting]:
        """Who is let in, one after another; then the others in order of arrival. ``gone`` are let
        in before. Changes nothing."""
        spare, taken = self._after(gone).least_allowance(), {one.number for one in gone}
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
            for waiting in self._tight(head):
                taken.add(waiting.number)
                yield waiting
            for number in sorted(self.requests.keys() - taken):
                yield self.requests[number]

    def _after(self, gone: Sequence[Waiting]) -> Passing:
        """The allowances once ``gone`` are let in."""
        if not gone:
            return self.passing
        trial = self.passing.copy()
        for waiting in gone:
            go(trial, waiting)
        return trial

    def _tight(self, gone: Iterable[Waiting]) -> Iterator[Waiting]:
        """The next ones after ``gone``, where budgets decide."""
        trial, chosen = self.passing, list(gone)
        for _ in range(TIGHT_PLACES):
            if chosen and trial is self.passing:  # most lines are asked for their first one alone
                trial = self.passing.copy()
            for waiting in chosen:
                go(trial, waiting)
            place = trial.shortest()
            if place < 0:
                return
            chosen = [self.requests[self.at[place]]]
            yield chosen[0]

    def reprice(self, cost: Cost) -> None:
        """The cost model has changed."""
        for waiting in self.requests.values():
            waiting.cost = cost.seconds(waiting.prefill)
        self.by_cost = sorted((*one.rank, one) for one in self.requests.values())
        self.work = sum(one.cost for one in self.requests.values())
        self._rebuild()

    def _rebuild(self, new: Waiting | None = None) -> None:
        """Everyone gets a new place, and ``new`` its first one."""
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
