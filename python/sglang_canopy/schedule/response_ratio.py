"""Who is next: the highest response ratio in seconds, a share of the work for the oldest.

Highest response ratio next (Brinch Hansen, 1971) ranks a request by (waited + cost) / cost: short
ones overtake, long ones gain by waiting. Here cost is predicted seconds of prefill and of loading
(``prefill_cost.py``). Past saturation nobody's wait is bounded by that rule, and a cap on age turns
it back into first come, first served once everyone is too old. So a share of all work is reserved
for each turn's oldest request: whatever passes it pays ``OLDEST_SHARE`` of its cost into an
account, and when that holds what the oldest costs, the oldest is next.

The bound: let a request cost ``c``, those of its turn that were there before it ``w`` together, and
none more than ``m``. Then no more than ``(1 + 1 / share) (w + m) + c`` seconds of its turn's work
are let in up to and with it, whatever comes later: the account never holds more than ``m`` when it
is paid into, and pays for nothing but ``w``.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from sglang_canopy.schedule.fair_shares import FairShares, Turn, first
from sglang_canopy.schedule.prefill_cost import Cost, Prefill, PrefillCost

OLDEST_SHARE = 0.3
"""Share of a turn's work that is reserved for its oldest request."""
RANKED = 2048
"""Waiting requests that are ranked at once, the oldest; those behind keep the order of arrival."""
PLACES = 128
"""Places at the head of the queue that are worked out; a pass rarely lets in more."""


@dataclass(slots=True, eq=False)
class Waiting:
    """A request in the queue."""

    number: int
    """Order of arrival."""
    arrived: float
    """Seconds, on the clock that ``ResponseRatio.order`` is given."""
    tenant: str | None
    turn: Turn
    """Under which it is served: its tenant's when it came."""
    urgency: int
    """Higher goes first, always (SGLang's priority)."""
    prefill: Prefill
    cost: float
    """Seconds."""
    about: Any = None
    """The caller's own."""


class _Line:
    """The requests of one turn and one urgency, by number, and what was paid for passing the
    oldest."""

    __slots__ = ("account", "requests")

    def __init__(self) -> None:
        self.requests: dict[int, Waiting] = {}
        self.account = 0.0
        """Seconds."""

    def oldest(self) -> Waiting:
        return next(iter(self.requests.values()))


class ResponseRatio:
    """The queue. ``cost`` says what a request costs; ``oldest_share`` 0 reserves nothing."""

    def __init__(self, cost: Cost | None = None, oldest_share: float = OLDEST_SHARE) -> None:
        self.cost: Cost = cost or PrefillCost()
        self.oldest_share = oldest_share
        self.shares = FairShares()
        self._numbers = itertools.count()
        self._lines: dict[int, dict[Turn, _Line]] = {}
        """By urgency and turn; none is empty."""
        self.let_in_by = {"rank": 0, "age": 0}
        """Requests that were let in: as the best of their turn, or as its oldest, out of the share
        that is reserved for it."""

    def __len__(self) -> int:
        return sum(len(line.requests) for turns in self._lines.values() for line in turns.values())

    def __iter__(self) -> Iterator[Waiting]:
        """In order of arrival."""
        lines = [line.requests for turns in self._lines.values() for line in turns.values()]
        return iter(sorted(itertools.chain(*map(dict.values, lines)), key=_number))

    def add(
        self,
        arrived: float,
        prefill: Prefill,
        tenant: str | None = None,
        urgency: int = 0,
        about: Any = None,
    ) -> Waiting:
        """A request comes in."""
        turn, cost = self.shares.turn_of(tenant), self.cost.seconds(prefill)
        waiting = Waiting(next(self._numbers), arrived, tenant, turn, urgency, prefill, cost, about)
        line = self._lines.setdefault(urgency, {}).setdefault(turn, _Line())
        line.requests[waiting.number] = waiting
        return waiting

    def update(self, waiting: Waiting, prefill: Prefill) -> None:
        """What is cached of ``waiting`` has changed."""
        waiting.prefill = prefill
        waiting.cost = self.cost.seconds(prefill)

    def reprice(self) -> None:
        """The cost model has changed."""
        for waiting in self:
            waiting.cost = self.cost.seconds(waiting.prefill)

    def remove(self, waiting: Waiting) -> bool:
        """``waiting`` leaves the queue uncomputed. False if it was not in it."""
        turns = self._lines.get(waiting.urgency, {})
        line = turns.get(waiting.turn)
        if line is None or line.requests.pop(waiting.number, None) is None:
            return False
        if not line.requests:
            del turns[waiting.turn]
            if not turns:
                del self._lines[waiting.urgency]
        return True

    def let_in(self, admitted: Iterable[Waiting]) -> None:
        """These are out of the queue and computed now, in this order."""
        for waiting in admitted:
            line = self._lines.get(waiting.urgency, {}).get(waiting.turn)
            if line is None:
                continue
            was_oldest = line.oldest() is waiting
            if self.remove(waiting):
                paid = was_oldest and line.account >= waiting.cost
                self.let_in_by["age" if paid else "rank"] += 1
                self.shares.charge(waiting.tenant, waiting.turn, waiting.cost)
                line.account = self._account(line.account, waiting, was_oldest)

    def order(self, now: float, places: int = PLACES) -> list[Waiting]:
        """The queue, first to be let in first. ``now``: seconds, equal on all ranks.

        Only the first ``places`` are worked out; behind them, in each urgency, everyone is in
        order of arrival. Changes nothing: what is let in is told by ``let_in``.
        """
        queue: list[Waiting] = []
        starts: dict[Turn, float] = {}
        for urgency in sorted(self._lines, reverse=True):
            turns = self._lines[urgency]
            taken = set()
            if len(queue) < places:
                most = max(1, RANKED // len(turns))
                walks = {turn: self._walk(line, now, most) for turn, line in turns.items()}
                heads = {turn: next(walk) for turn, walk in walks.items()}
                starts = self.shares.starts(turns) | starts
                mine = {turn: starts[turn] for turn in turns}
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
            behind = [
                waiting
                for line in turns.values()
                for number, waiting in line.requests.items()
                if number not in taken
            ]
            if len(turns) > 1:
                behind.sort(key=_number)
            queue += behind
        return queue

    def _walk(self, line: _Line, now: float, most: int) -> Iterator[Waiting]:
        """The line in the order in which it is let in: by rank, or the oldest if paid for."""
        group = list(itertools.islice(line.requests.values(), most))
        # The order of waited / cost is that of (waited + cost) / cost.
        ranked = sorted([((w.arrived - now) / w.cost, w.number, w) for w in group])
        account, taken, at = line.account, set(), 0
        ranks = iter(ranked)
        for _ in group:
            while group[at].number in taken:
                at += 1
            oldest = waiting = group[at]
            if account < oldest.cost:
                waiting = next(w for _, number, w in ranks if number not in taken)
            taken.add(waiting.number)
            account = self._account(account, waiting, waiting is oldest)
            yield waiting

    def _account(self, held: float, waiting: Waiting, was_oldest: bool) -> float:
        """What a line's account holds once ``waiting`` is let in."""
        if was_oldest:  # by its rank alone, if it was not paid for
            return held - waiting.cost if held >= waiting.cost else held
        return held + self.oldest_share * waiting.cost


def _number(waiting: Waiting) -> int:
    return waiting.number
