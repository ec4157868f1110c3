"""A scheduler's waiting queue, kept in step with the list that the scheduler has.

A scheduler, live or simulated, knows a list of requests that wait and takes from its head. Before
each pass it asks here for the list in order, and after it says whom it let in. Whoever is gone
otherwise was given up. A bounded number of requests is looked up again in each pass, since their
prefixes may have been computed or evicted in the meantime.

Requests are told apart by object, never by a name: clients choose names, and use them again.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, KeysView, Mapping, Sequence
from itertools import islice
from typing import Generic, Protocol, TypeVar

from sglang_canopy.schedule.bounded_shortest import BoundedShortest
from sglang_canopy.schedule.line import Waiting
from sglang_canopy.schedule.prefill_cost import Prefill
from sglang_canopy.schedule.shared_prefix import PLACES, Path, deferred

HEAD_LOOKUPS = 8
"""Requests at the head of the queue that are looked up again in a pass."""
ROUND_LOOKUPS = 4
"""And of the others, in turn."""
SHARERS = 128
"""Places at the head of the queue that are looked at for who shares a step with a long prompt."""

STEPS = 2
"""So many steps' tokens at the head of the queue are looked at for who may be let in at all: what is
cached of a request may be more than was known."""

T = TypeVar("T")
T_in = TypeVar("T_in", contravariant=True)


class Requests(Protocol[T_in]):
    """What is to be known of a scheduler's requests."""

    def tenant(self, request: T_in) -> str | None:
        """Whose it is."""

    def urgency(self, request: T_in) -> int:
        """Higher goes first, always."""

    def prefill(self, request: T_in, look_up: bool) -> Prefill:
        """What is to be computed of it. ``look_up``: look it up, whatever is known from before."""

    def path(self, request: T_in) -> tuple[Path, int]:
        """Its prompt's whole blocks, and how many tokens one has."""

    def rest(self, request: T_in) -> Prefill:
        """What is still to be computed of one that is in the middle of its chunks."""

    def step_tokens_worth(self) -> float:
        """Tokens whose computing takes as long as a step costs beside its tokens."""

    def step_tokens(self) -> int:
        """Tokens that one step takes at most."""


class Arranged(Generic[T]):
    """The queue in the order of ``order``."""

    def __init__(self, order: BoundedShortest, requests: Requests[T], defers: bool = True) -> None:
        """``defers``: whether ``deferred`` is asked."""
        self.order = order
        self._defers = defers
        self._requests = requests
        self._waiting: dict[int, Waiting] = {}
        """By ``id`` of the scheduler's request, which is kept alive by it."""
        self._let_in: dict[int, Waiting] = {}
        """Those that may come back, likewise."""
        self._last: list[Waiting] = []
        """As arranged last."""
        self._round = 0
        self._passed: set[int] = set()
        """Who was not let in though others behind it were: nobody waits for them."""
        self._held: dict[int, int | None] = {}
        """Who was left out of the last step, and for whom (``deferred``)."""

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def waiting(self) -> Mapping[int, Waiting]:
        """By ``id`` of the scheduler's request."""
        return self._waiting

    def arrange(self, queue: Sequence[T], chunked: T | None = None) -> list[T]:
        """``queue``, first to be let in first. ``chunked``: who is in the middle of its chunks."""
        waiting = self._waiting
        self.keep(queue)
        chunk = self._let_in.get(id(chunked))
        self.order.chunked(chunk, 0.0 if chunk is None else self._seconds_left(chunk))
        for request in queue:
            if id(request) not in waiting:
                waiting[id(request)] = self._added(request)
        if len(queue) < 2:
            self._last = list(waiting.values())
            return list(queue)
        self._refresh()
        self._last = self.order.order()
        return self.arranged()

    def arranged(self) -> list[T]:
        """The queue as it is arranged now, which ``deferred`` and ``sharing`` may change."""
        return [one.about for one in self._last]

    def _seconds_left(self, chunk: Waiting) -> float:
        return self.order.cost.seconds(self._requests.rest(chunk.about))

    def _added(self, request: T) -> Waiting:
        about, prefill = self._requests, self._requests.prefill(request, False)
        before = self._let_in.pop(id(request), None)
        if before is not None:
            self.order.back(before, prefill)
            return before
        return self.order.add(prefill, about.tenant(request), about.urgency(request), request)

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
        self._let_in.update((id(waiting.about), waiting) for waiting in entered)
        return [waiting.about for waiting in entered]

    @property
    def may_come_back(self) -> KeysView[int]:
        """Ids of those that were let in and are not over, as far as is known here."""
        return self._let_in.keys()

    def over(self, gone: Iterable[int]) -> None:
        """These, by id, will not come back."""
        for key in gone:
            waiting = self._let_in.pop(key, None)
            if waiting is not None and waiting is self.order.chunk:
                self.order.chunked(None, 0.0)

    def deferred(self, computing: Iterable[T]) -> list[T]:
        """Of those arranged last, who should not be let in now, since what it shares with one
        before it is not computed yet. ``computing``: requests that were let in and whose prompts
        the tree does not have yet. To be called once a pass, or not at all."""
        begun = [self._requests.path(request)[0] for request in computing]
        self._held = self._waits_for(begun)
        return self._left_out()

    def _left_out(self) -> list[T]:
        """Those that are held, and who would overdraw their budgets while they are."""
        here = [one for one in self._last if one.number not in self._held]
        barred = self.order.may_not_pass(here, STEPS * self._requests.step_tokens())
        self._held.update((one.number, None) for one in barred)
        return [one.about for one in self._last if one.number in self._held] if self._held else []

    def sharing(
        self, chunk_tokens: int, step_tokens: int, page: int, fits: Callable[[T], bool]
    ) -> tuple[list[T], list[T]]:
        """Who shares a step with the prompt in the middle of its chunks, of which ``chunk_tokens``
        are left: shorter ones that are as urgent, for at most half of the step, or for what it does
        not need itself. And who should not be let in now, since a budget has no more for them after
        that. ``fits``: whether there is room for one beside those for whom it was asked before."""
        room = step_tokens - min(max(page, step_tokens // 2), chunk_tokens)

        def shares(waiting: Waiting) -> bool:
            nonlocal room
            tokens = waiting.prefill.uncached
            pages = -(-tokens // page) * page
            if tokens >= chunk_tokens or pages > room:
                return False
            now = self._requests.prefill(waiting.about, True)
            if now.uncached > tokens or not fits(waiting.about):  # it costs more than was known
                return False
            room -= pages
            return True

        chunk = self.order.chunk
        head = [
            one
            for one in self._last[:SHARERS]
            if one.number not in self._held and (chunk is None or one.urgency >= chunk.urgency)
        ]
        found = self.order.may_go(head, shares)
        if not found:
            return [], []
        self._last = [*found, *self.order.order(gone=found)]
        return [one.about for one in found], self._left_out()

    def _waits_for(self, begun: Sequence[Path]) -> dict[int, int | None]:
        """Who waits for what somebody else computes, and for whom, by number."""
        head = list(islice(self._last, PLACES))
        if not self._defers or not head or len(self._last) + len(begun) < 2:
            return {}
        held = self._sharing(head, begun)
        if held:
            for one in head:
                if one.number in held:  # what they wait for may be there by now
                    self.order.update(one, self._requests.prefill(one.about, True))
            self._last = self.order.order()  # who costs more now may pass fewer
            head = list(islice(self._last, PLACES))
            held = self._sharing(head, begun)
        return held

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
