"""Who is next: the shortest, as long as nobody is passed by more than its budget.

Cost is predicted seconds of prefill and of loading (``prefill_cost.py``). Shortest first has the
least mean wait of all orders, and starves long requests. So each request gets a budget when it
comes: B = kappa w + lambda c + beta seconds of younger work may be let in before it, where w is the
older work that it finds, c its own cost, kappa = max_wait_factor - 1, lambda ``OWN`` and beta
``LEAST_S``. Nobody is let in past somebody whose budget it would overdraw, and the oldest may always
go. The prompt in the middle of its chunks has its budget as well, for those who share its steps.

The bound: no more than (1 + kappa) w + (1 + lambda) c + beta seconds of its turn's work are let in up
to and with a request, whatever comes later. What is let in before it is older (at most w), its own
(c), or younger, and all that is younger was charged to B. Beside that are the rest of the step that
it ends in, what retractions compute again, steps of decoding, and a higher priority, which always
goes first.

A turn is a tenant's (``fair_shares.py``); budgets count within one turn and one priority.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from sglang_canopy.schedule.fair_shares import PUBLIC, FairShares, Turn, first
from sglang_canopy.schedule.line import Line, Waiting, go, number_of
from sglang_canopy.schedule.passing import Passing
from sglang_canopy.schedule.predicted_ttft import WorkBefore
from sglang_canopy.schedule.prefill_cost import Cost, Prefill, PrefillCost

MAX_WAIT_FACTOR = 1.0
"""1 + kappa, unless said otherwise."""
OWN = 10.0
"""lambda: a request may be passed for so many times as long as it takes itself."""
LEAST_S = 2.0
"""beta."""
PLACES = 128
"""Places at the head of the queue that are worked out; a pass rarely lets in more."""


class BoundedShortest:
    """The queue. ``cost`` says what a request costs; with a ``max_wait_factor`` of infinity nobody is
    held up for another, with 1, ``own`` and ``least_s`` 0 it is first come, first served."""

    def __init__(
        self,
        cost: Cost | None = None,
        max_wait_factor: float = MAX_WAIT_FACTOR,
        own: float = OWN,
        least_s: float = LEAST_S,
    ) -> None:
        self.cost: Cost = cost or PrefillCost()
        self.max_wait_factor = max_wait_factor
        self.own = own
        self.least_s = least_s
        self.shares = FairShares()
        self._numbers = itertools.count()
        self._lines: dict[int, dict[Turn, Line]] = {}
        """By urgency and turn; none is empty but for that of the chunk."""
        self.chunk: Waiting | None = None
        """In the middle of its chunks."""
        self._rest_s = 0.0
        """What the rest of it costs."""
        self.let_in_by = {"shortest": 0, "budget": 0}
        """Requests that were let in: as the shortest of their turn, or since a shorter one would
        have overdrawn a budget, or could not be taken."""

    def __len__(self) -> int:
        return sum(len(line.requests) for turns in self._lines.values() for line in turns.values())

    def __iter__(self) -> Iterator[Waiting]:
        """In order of arrival."""
        lines = [line.requests for turns in self._lines.values() for line in turns.values()]
        return iter(sorted(itertools.chain(*map(dict.values, lines)), key=number_of))

    def add(
        self,
        prefill: Prefill,
        tenant: str | None = None,
        urgency: int = 0,
        about: Any = None,
    ) -> Waiting:
        """A request comes in."""
        turn, cost = self.shares.turn_of(tenant), self.cost.seconds(prefill)
        waiting = Waiting(next(self._numbers), tenant, turn, urgency, prefill, cost)
        waiting.about = about
        line = self._line(waiting)
        waiting.left = self._budget(line, cost)
        line.add(waiting, youngest=True)
        return waiting

    def _budget(self, line: Line | None, cost: float) -> float:
        """Of a request that comes to ``line`` now."""
        before_s = 0.0
        if line is not None:
            before_s = line.work + (self._rest_s if line.chunk is not None else 0.0)
        # No infinity times zero: nothing before it is nothing to wait for.
        for_others = (self.max_wait_factor - 1.0) * before_s if before_s else 0.0
        return for_others + self.own * cost + self.least_s

    def back(self, waiting: Waiting, prefill: Prefill) -> None:
        """A request that was let in waits again: with its place, and what is left of its budget."""
        waiting.prefill = prefill
        waiting.cost = self.cost.seconds(prefill)
        self._line(waiting).add(waiting, youngest=False)

    def update(self, waiting: Waiting, prefill: Prefill) -> None:
        """What is cached of ``waiting`` has changed."""
        self._line(waiting).update(waiting, prefill, self.cost.seconds(prefill))

    def reprice(self) -> None:
        """The cost model has changed."""
        for turns in self._lines.values():
            for line in turns.values():
                line.reprice(self.cost)

    def remove(self, waiting: Waiting) -> bool:
        """``waiting`` leaves the queue uncomputed. False if it was not in it."""
        line = self._lines.get(waiting.urgency, {}).get(waiting.turn)
        if line is None or not line.remove(waiting):
            return False
        self._tidy(waiting, line)
        return True

    def let_in(self, admitted: Iterable[Waiting]) -> None:
        """These are out of the queue and computed now, in this order."""
        for waiting in admitted:
            line = self._lines.get(waiting.urgency, {}).get(waiting.turn)
            if line is None or waiting.number not in line.requests:
                continue
            shortest = line.by_cost[0][2] is waiting
            self.let_in_by["shortest" if shortest else "budget"] += 1
            line.let_in(waiting)
            self._tidy(waiting, line)
            self.shares.charge(waiting.tenant, waiting.turn, waiting.cost)

    def chunked(self, waiting: Waiting | None, rest_s: float) -> None:
        """Who is in the middle of its chunks, and what the rest of it costs. Whoever shares its
        steps passes it."""
        before, self.chunk = self.chunk, waiting
        self._rest_s = rest_s
        if waiting is not before:
            if before is not None:
                line = self._line(before)
                line.let_pass(None)
                self._tidy(before, line)
            if waiting is not None:
                self._line(waiting).let_pass(waiting)

    def work_before(self, waiting: Waiting) -> WorkBefore:
        """What ``waiting``, which is in the queue, has before it."""
        lines = self._lines[waiting.urgency]
        mine = lines[waiting.turn].before(waiting.cost, waiting.number)
        return self._work_before(
            waiting.cost, waiting.urgency, waiting.turn, mine, self.left(waiting)
        )

    def work_before_new(self, cost: float) -> WorkBefore:
        """What a request of such a cost, and that names no tenant, would have before it."""
        line = self._lines.get(0, {}).get(PUBLIC)
        mine = 0.0 if line is None else line.before(cost, sys.maxsize)
        return self._work_before(cost, 0, PUBLIC, mine, self._budget(line, cost))

    def _work_before(
        self, cost: float, urgency: int, turn: Turn, mine: float, budget: float
    ) -> WorkBefore:
        before = mine
        for other_urgency, lines in self._lines.items():
            for other, line in lines.items():
                if other_urgency > urgency:
                    before += line.work
                elif other_urgency == urgency and other != turn:
                    before += min(line.work, mine + cost)  # turns get equal seconds
        if self.chunk is not None:  # which keeps half of the steps that shorter ones share
            shares = cost < self._rest_s
            before += min(self._rest_s, before + cost) if shares else self._rest_s
        return WorkBefore(cost, before, max(budget, 0.0))

    def left(self, waiting: Waiting) -> float:
        """Seconds of younger work that may still be let in before ``waiting``."""
        return self._line(waiting).passing.allowance(waiting.place)

    def may_go(
        self, candidates: Iterable[Waiting], fits: Callable[[Waiting], bool]
    ) -> list[Waiting]:
        """Of ``candidates``, in this order, those that ``fits`` lets in and that overdraw nobody's
        budget, while whoever is not among them goes on waiting."""
        trials: dict[int, Passing] = {}
        found = []
        for waiting in candidates:
            line = self._line(waiting)
            trial = trials.get(id(line))
            if trial is None:
                trial = trials[id(line)] = line.passing.copy()
            if trial.may_go(waiting.place) and fits(waiting):
                go(trial, waiting)
                found.append(waiting)
        return found

    def may_not_pass(self, order: Iterable[Waiting], tokens: int) -> list[Waiting]:
        """Of ``order``, first to be let in first, who would overdraw the budget of somebody that is
        not in it, or is the prompt in the middle of its chunks. Looked at are those who fill
        ``tokens``."""
        lines = [line for turns in self._lines.values() for line in turns.values()]
        if all(line.passing.least_allowance() >= line.work for line in lines):
            return []
        looked_at: list[Waiting] = []

        def head() -> Iterator[Waiting]:
            for waiting in order:
                if tokens <= 0:
                    return
                looked_at.append(waiting)
                yield waiting

        def computes(waiting: Waiting) -> bool:
            nonlocal tokens
            tokens -= waiting.prefill.uncached
            return True

        may = {one.number for one in self.may_go(head(), computes)}
        return [one for one in looked_at if one.number not in may]

    def order(self, places: int = PLACES, gone: Sequence[Waiting] = ()) -> list[Waiting]:
        """The queue without ``gone``, which are let in before it; first to be let in first.

        Only the first ``places`` are worked out; behind them, in each urgency, everyone is in
        order of arrival. Changes nothing: what is let in is told by ``let_in``.
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
            behind = [w for line in turns.values() for w in line.requests.values()]
            queue += sorted((w for w in behind if w.number not in taken), key=number_of)
        return queue

    def _line(self, waiting: Waiting) -> Line:
        turns = self._lines.setdefault(waiting.urgency, {})
        line = turns.get(waiting.turn)
        if line is None:
            line = turns[waiting.turn] = Line()
        return line

    def _tidy(self, waiting: Waiting, line: Line) -> None:
        """Drop ``line``, ``waiting``'s, if nobody is in it."""
        if not line.requests and line.chunk is None:
            turns = self._lines[waiting.urgency]
            del turns[waiting.turn]
            if not turns:
                del self._lines[waiting.urgency]
