"""Bounded shortest-first order: admit the cheapest request that every overtaking budget allows.

Cost is the predicted seconds of the server that a request takes: its prefill, with KV loading
(``prefill_cost.py``), and its answer, as a share of the places or of the KV (``answer_cost.py``).
Shortest-first minimises the mean wait but starves long requests, so each request gets an overtaking
budget on arrival:

    B = kappa w + lambda c + beta    seconds of younger work that may be admitted before it

where w is the older work waiting at its arrival, c its own cost, kappa = ``max_wait_factor`` - 1,
lambda = ``OWN`` and beta = ``MIN_S``. A request may not overdraw the budget of an older request;
the oldest may always go. A chunked prefill keeps its budget for requests that share its steps.

Bound: regardless of later arrivals, at most (1 + kappa) w + (1 + lambda) c + beta seconds of its
turn's work are admitted up to and including a request, because work admitted before it is either
older (at most w) or charged to B; and a request that is the oldest of its turn is overtaken for at
most B seconds of the clock. The clock holds where the predictions do not: one place that frees again
and again beside long answers serves one overtaker after the other.

The bound excludes the rest of its last step, the running answers that must end to make room,
recomputation after retractions, higher priorities, and work admitted while the request's KV is read
from storage, since SGLang passes over such requests.

Budgets count within one turn (a tenant's share, ``fair_shares.py``) and one priority.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from sglang_canopy.schedule.fair_shares import FairShares, Turn, first
from sglang_canopy.schedule.line import Line, Waiting, go, number_of
from sglang_canopy.schedule.passing import Passing
from sglang_canopy.schedule.prefill_cost import Cost, Prefill, PrefillCost
from sglang_canopy.tenant import Party

MAX_WAIT_FACTOR = 1.0
"""1 + kappa."""
OWN = 10.0
"""lambda: the budget grows by this multiple of the request's own cost."""
MIN_S = 2.0
"""beta, in seconds."""
Place = tuple[int, Turn]
"""Priority and turn of a request."""
PLACES = 128
"""Positions at the head of the queue that are sorted; a pass rarely admits more."""


class BoundedShortest:
    """Queue in bounded shortest-first order.

    ``max_wait_factor=inf`` is pure shortest-first; 1, with ``own`` and ``least_s`` 0, is FCFS.
    """

    def __init__(
        self,
        cost: Cost | None = None,
        max_wait_factor: float = MAX_WAIT_FACTOR,
        own: float = OWN,
        least_s: float = MIN_S,
    ) -> None:
        self.cost: Cost = cost or PrefillCost()
        self.max_wait_factor = max_wait_factor
        self.own = own
        self.least_s = least_s
        self.shares = FairShares()
        self._numbers = itertools.count()
        self._lines: dict[int, dict[Turn, Line]] = {}
        """Priority -> turn -> line. Empty lines are dropped, except the chunked prefill's."""
        self._by_arrival: dict[int, dict[int, Waiting]] = {}
        """Priority -> number -> queued request, in order of arrival."""
        self.chunk: Waiting | None = None
        """The chunked prefill in progress."""
        self._chunk_remaining_s = 0.0
        self.admitted_by = {"shortest": 0, "budget": 0}
        """Admissions by reason. "budget": a cheaper request was passed over because it would have
        overdrawn a budget or did not fit."""

    def __len__(self) -> int:
        return sum(map(len, self._by_arrival.values()))

    def __iter__(self) -> Iterator[Waiting]:
        """Iterate in order of arrival."""
        return iter(
            sorted(itertools.chain(*map(dict.values, self._by_arrival.values())), key=number_of)
        )

    def add(
        self,
        prefill: Prefill,
        tenant: Party = None,
        urgency: int = 0,
        about: Any = None,
    ) -> Waiting:
        turn, cost = self.shares.turn_of(tenant), self.cost.seconds(prefill)
        waiting = Waiting(next(self._numbers), tenant, turn, urgency, prefill, cost)
        waiting.about = about
        line = self._line(waiting)
        waiting.left = waiting.budget_s = self._budget(line, cost)
        line.add(waiting, youngest=True)
        self._by_arrival.setdefault(urgency, {})[waiting.number] = waiting
        return waiting

    def _budget(self, line: Line | None, cost: float) -> float:
        """Return the overtaking budget, in seconds, of a new request."""
        before_s = 0.0
        if line is not None:
            before_s = line.work + (self._chunk_remaining_s if line.chunk is not None else 0.0)
        # Avoid inf * 0: with no older work, kappa is irrelevant.
        for_others = (self.max_wait_factor - 1.0) * before_s if before_s else 0.0
        return for_others + self.own * cost + self.least_s

    def back(self, waiting: Waiting, prefill: Prefill) -> None:
        """Requeue a retracted request at its old position, with the rest of its budget."""
        waiting.prefill = prefill
        waiting.cost = self.cost.seconds(prefill)
        self._line(waiting).add(waiting, youngest=False)
        arrived = {waiting.number: waiting, **self._by_arrival.get(waiting.urgency, {})}
        self._by_arrival[waiting.urgency] = dict(sorted(arrived.items()))

    def update(self, waiting: Waiting, prefill: Prefill) -> None:
        """Update the cost of ``waiting`` after a new prefix match."""
        self._line(waiting).update(waiting, prefill, self.cost.seconds(prefill))

    def set_time(self, now: float) -> None:
        """Pass the time, in seconds on any clock that all ranks share. Call before each pass."""
        for turns in self._lines.values():
            for line in turns.values():
                line.set_time(now)

    def reprice(self) -> None:
        """Recompute all costs after a change of the cost model."""
        for turns in self._lines.values():
            for line in turns.values():
                line.reprice(self.cost)

    def remove(self, waiting: Waiting) -> bool:
        """Remove an aborted request; return False if it was not queued."""
        line = self._lines.get(waiting.urgency, {}).get(waiting.turn)
        if line is None or not line.remove(waiting):
            return False
        self._left(waiting, line)
        return True

    def admit(self, admitted: Iterable[Waiting]) -> None:
        """Admit requests in this order, charging budgets and fair shares."""
        for waiting in admitted:
            line = self._lines.get(waiting.urgency, {}).get(waiting.turn)
            if line is None or waiting.number not in line.requests:
                continue
            shortest = line.by_cost[0][2] is waiting
            self.admitted_by["shortest" if shortest else "budget"] += 1
            line.admit(waiting)
            self._left(waiting, line)
            self.shares.charge(waiting.tenant, waiting.turn, waiting.cost)

    def chunked(self, waiting: Waiting | None, rest_s: float) -> None:
        """Set the chunked prefill and its remaining cost, in seconds; ``None`` ends it."""
        before, self.chunk = self.chunk, waiting
        self._chunk_remaining_s = rest_s
        if waiting is not before:
            if before is not None:
                line = self._line(before)
                line.let_pass(None)
                self._drop_if_empty(before, line)
            if waiting is not None:
                self._line(waiting).let_pass(waiting)

    def left(self, waiting: Waiting) -> float:
        """Seconds of younger work that may still be admitted before ``waiting``."""
        return self._line(waiting).passing.allowance(waiting.place)

    def may_go(
        self, candidates: Iterable[Waiting], fits: Callable[[Waiting], bool]
    ) -> list[Waiting]:
        """Select candidates, in order, that ``fits`` accepts and that overdraw no budget.

        Candidates that are not selected count as still waiting.
        """
        trials: dict[int, Passing] = {}
        selected = []
        for waiting in candidates:
            line = self._line(waiting)
            trial = trials.get(id(line))
            if trial is None:
                trial = trials[id(line)] = line.passing.copy()
            if trial.may_go(waiting.place) and fits(waiting):
                go(trial, waiting)
                selected.append(waiting)
        return selected

    def may_not_pass(self, order: Iterable[Waiting], tokens: int) -> list[Waiting]:
        """Return requests that would overdraw a budget if admitted in this order.

        Budgets of requests outside ``order``, and of the chunked prefill, count. Only the head of
        ``order`` is checked, up to ``tokens`` uncached tokens.
        """
        lines = [line for turns in self._lines.values() for line in turns.values()]
        if all(line.passing.least_allowance() >= line.work for line in lines):
            return []
        checked: list[Waiting] = []

        def head() -> Iterator[Waiting]:
            for waiting in order:
                if tokens <= 0:
                    return
                checked.append(waiting)
                yield waiting

        def computes(waiting: Waiting) -> bool:
            nonlocal tokens
            tokens -= waiting.prefill.uncached
            return True

        may = {one.number for one in self.may_go(head(), computes)}
        return [one for one in checked if one.number not in may]

    def order(self, places: int = PLACES, gone: Sequence[Waiting] = ()) -> list[Waiting]:
        """Return the queue in admission order, assuming ``gone`` is admitted first.

        Only the first ``places`` are sorted; the rest of each priority is in order of arrival. Does
        not change the queue: call ``admit`` to admit.
        """
        queue: list[Waiting] = []
        starts: dict[Turn, float] = {}
        taken = {waiting.number for waiting in gone}
        for urgency in sorted(self._lines, reverse=True):
            turns = {t: line for t, line in self._lines[urgency].items() if line.requests}
            if len(queue) < places and turns:
                walks = {
                    turn: line.walk([w for w in gone if w.number in line.requests])
                    for turn, line in turns.items()
                }
                heads = {turn: one for turn, walk in walks.items() if (one := next(walk, None))}
                starts = self.shares.starts(turns) | starts
                mine = {turn: starts[turn] for turn in heads}
                while heads and len(queue) < places:
                    turn = first(mine)
                    queue.append(heads[turn])
                    taken.add(heads[turn].number)
                    mine[turn] += heads[turn].cost
                    starts[turn] = mine[turn]
                    following = next(walks[turn], None)
                    if following is None:
                        del heads[turn], mine[turn]
                    else:
                        heads[turn] = following
            behind = self._by_arrival.get(urgency, {}).copy()
            for number in taken:
                behind.pop(number, None)
            queue += behind.values()
        return queue

    def _line(self, waiting: Waiting) -> Line:
        turns = self._lines.setdefault(waiting.urgency, {})
        line = turns.get(waiting.turn)
        if line is None:
            line = turns[waiting.turn] = Line()
        return line

    def _left(self, waiting: Waiting, line: Line) -> None:
        arrived = self._by_arrival[waiting.urgency]
        del arrived[waiting.number]
        if not arrived:
            del self._by_arrival[waiting.urgency]
        self._drop_if_empty(waiting, line)

    def _drop_if_empty(self, waiting: Waiting, line: Line) -> None:
        if not line.requests and line.chunk is None:
            turns = self._lines[waiting.urgency]
            del turns[waiting.turn]
            if not turns:
                del self._lines[waiting.urgency]
