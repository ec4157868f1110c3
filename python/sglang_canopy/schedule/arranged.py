"""A scheduler's waiting queue, kept in step with the list that the scheduler has.

A scheduler, live or simulated, knows a list of requests that wait and takes from its head. Before
each pass it asks here for the list in order, and after it says whom it let in. Whoever is gone
otherwise was given up. A bounded number of requests is looked up again in each pass, since their
prefixes may have been computed or evicted in the meantime.

Requests are told apart by object, never by a name: clients choose names, and use them again.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from itertools import islice
from typing import Generic, Protocol, TypeVar

from sglang_canopy.schedule.prefill_cost import Prefill
from sglang_canopy.schedule.response_ratio import ResponseRatio, Waiting
from sglang_canopy.schedule.shared_prefix import PLACES, Path, deferred

HEAD_LOOKUPS = 8
"""Requests at the head of the queue that are looked up again in a pass."""
ROUND_LOOKUPS = 4
"""And of the others, in turn."""

T = TypeVar("T")
T_in = TypeVar("T_in", contravariant=True)


class Requests(Protocol[T_in]):
    """What is to be known of a scheduler's requests."""

    def arrived(self, request: T_in) -> float:
        """Seconds, on the clock of ``Arranged.arrange``; that of its first arrival."""

    def tenant(self, request: T_in) -> str | None:
        """Whose it is."""

    def urgency(self, request: T_in) -> int:
        """Higher goes first, always."""

    def prefill(self, request: T_in, again: bool) -> Prefill:
        """What is to be computed of it. ``again``: look it up, whatever is known from before."""

    def path(self, request: T_in) -> tuple[Path, int]:
        """Its prompt's whole blocks, and how many tokens one has."""

    def step_tokens_worth(self) -> float:
        """Tokens whose computing takes as long as a step costs beside its tokens."""


class Arranged(Generic[T]):
    """The queue in the order of ``order``."""

    def __init__(self, order: ResponseRatio, requests: Requests[T], defers: bool = True) -> None:
        """``defers``: whether ``deferred`` is asked."""
        self.order = order
        self._defers = defers
        self._requests = requests
        self._waiting: dict[int, Waiting] = {}
        """By ``id`` of the scheduler's request, which is kept alive by it."""
        self._last: list[Waiting] = []
        """As arranged last."""
        self._round = 0
        self._passed: set[int] = set()
        """Who was not let in though others behind it were: nobody waits for them."""
        self._held: dict[int, int | None] = {}
        """Who was left out of the last step, and for whom (``deferred``)."""

    def __len__(self) -> int:
        return len(self._waiting)

    def arrange(self, queue: Sequence[T], now: float) -> list[T]:
        """``queue``, first to be let in first."""
        about, waiting = self._requests, self._waiting
        self.keep(queue)
        for request in queue:
            if id(request) not in waiting:
                waiting[id(request)] = self.order.add(
                    about.arrived(request),
                    about.prefill(request, False),
                    about.tenant(request),
                    about.urgency(request),
                    request,
                )
        if len(queue) < 2:
            self._last = list(waiting.values())
            return list(queue)
        self._refresh()
        self._last = self.order.order(now)
        return [one.about for one in self._last]

    def keep(self, queue: Iterable[T]) -> None:
        """Whoever is not in ``queue`` was given up."""
        gone = self._waiting.keys() - {id(request) for request in queue}
        for waiting in self._taken_out(gone):
            self.order.remove(waiting)

    def let_in(self, requests: Iterable[T]) -> list[T]:
        """These are computed now; returns those of them that waited."""
        before: list[int] = []
        admitted = self._waiting.keys() & {id(request) for request in requests}
        for waiting in self._last if self._defers and admitted else ():
            if id(waiting.about) not in admitted:
                before.append(waiting.number)
            else:
                self._passed.update(n for n in before if n not in self._held)
                before.clear()
        entered = self._taken_out(admitted)
        self.order.let_in(entered)
        return [waiting.about for waiting in entered]

    def deferred(self, computing: Iterable[T]) -> list[T]:
        """Of those arranged last, who should not be let in now, since what it shares with one
        before it is not computed yet. ``computing``: requests that were let in and whose prompts
        the tree does not have yet. To be called once a pass, or not at all."""
        about = self._requests
        begun = [about.path(request)[0] for request in computing]
        head = list(islice(self._last, PLACES))
        if not self._defers or not head or len(self._last) + len(begun) < 2:
            self._held = {}
            return []
        self._held = self._sharing(head, begun)
        for one in head:
            if one.number in self._held:  # what they wait for may be there by now
                self.order.update(one, about.prefill(one.about, True))
        if self._held:
            self._held = self._sharing(head, begun)
        return [one.about for one in head if one.number in self._held]

    def _sharing(self, head: Sequence[Waiting], begun: Sequence[Path]) -> dict[int, int | None]:
        about = self._requests
        return deferred(
            [one for one in head if one.number not in self._passed],
            lambda request: about.path(request)[0],
            begun,
            about.path(head[0].about)[1],
            about.step_tokens_worth(),
        )

    def nothing_to_do(self) -> None:
        """Without those who were left out there was nothing to compute: nobody waits again for
        those that they wait for."""
        self._passed.update(n for n in self._held.values() if n is not None)

    def _taken_out(self, gone: Collection[int]) -> list[Waiting]:
        """Those with these ids, in the order in which they were arranged; they are forgotten."""
        if not gone:
            return []
        taken = [waiting for waiting in self._last if id(waiting.about) in gone]
        self._last = [waiting for waiting in self._last if id(waiting.about) not in gone]
        for waiting in taken:
            del self._waiting[id(waiting.about)]
            self._passed.discard(waiting.number)
        return taken

    def _refresh(self) -> None:
        """Look a few requests up again: those at the head, and of the others some in turn."""
        size = len(self._last)
        chosen = list(islice(self._last, HEAD_LOOKUPS))
        for _ in range(min(ROUND_LOOKUPS, size - len(chosen))):
            self._round = max((self._round + 1) % size, HEAD_LOOKUPS)
            chosen.append(self._last[self._round])
        for waiting in chosen:
            self.order.update(waiting, self._requests.prefill(waiting.about, True))
