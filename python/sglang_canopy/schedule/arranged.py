"""A scheduler's waiting queue, kept in step with the list that the scheduler has.

A scheduler, live or simulated, knows a list of requests that wait and takes from its head. Before
each pass it asks here for the list in order: who is new is added, who is gone was let in or given
up, and a bounded number of requests is looked up again, since their prefixes may have been computed
or evicted in the meantime.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
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

    def key(self, request: T_in) -> Hashable:
        """What tells it from the others."""

    def arrived(self, request: T_in) -> float:
        """Seconds, on the clock of ``Arranged.arrange``; that of its first arrival."""

    def tenant(self, request: T_in) -> str | None:
        """Whose it is."""

    def urgency(self, request: T_in) -> int:
        """Higher goes first, always."""

    def given_up(self, request: T_in) -> bool:
        """Whether it left the queue without being computed."""

    def prefill(self, request: T_in, again: bool) -> Prefill:
        """What is to be computed of it. ``again``: look it up, whatever is known from before."""

    def path(self, request: T_in) -> tuple[Path, int]:
        """Its prompt's whole blocks, and how many tokens one has."""

    def computing(self, request: T_in) -> bool:
        """Of one that was let in: whether the tree does not have all of its prompt yet."""

    def step_tokens_worth(self) -> float:
        """Tokens whose computing takes as long as a step costs beside its tokens."""


class Arranged(Generic[T]):
    """The queue in the order of ``order``."""

    def __init__(self, order: ResponseRatio, requests: Requests[T], defers: bool = True) -> None:
        """``defers``: whether ``deferred`` is asked."""
        self.order = order
        self._defers = defers
        self._requests = requests
        self._waiting: dict[Hashable, Waiting] = {}
        self._last: list[Waiting] = []
        """As arranged last."""
        self._round = 0
        self._computing: dict[Hashable, T] = {}
        """Let in, and not in the tree yet."""
        self._passed: set[int] = set()
        """Who was not let in though others behind it were: nobody waits for them."""
        self._held: dict[int, int | None] = {}
        """Who was left out of the last step, and for whom (``deferred``)."""

    def __len__(self) -> int:
        return len(self._waiting)

    def arrange(self, queue: Sequence[T], now: float) -> list[T]:
        """``queue``, first to be let in first."""
        about, waiting = self._requests, self._waiting
        self._leave({about.key(request) for request in queue})
        for request in queue:
            key = about.key(request)
            if key not in waiting:
                waiting[key] = self.order.add(
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

    def deferred(self) -> list[T]:
        """Of those arranged last, who should not be let in now, since what it shares with one
        before it is not computed yet. To be called once a pass, or not at all."""
        about = self._requests
        self._computing = {k: r for k, r in self._computing.items() if about.computing(r)}
        head = list(islice(self._last, PLACES))
        if not self._defers or not head or len(self._last) + len(self._computing) < 2:
            self._held = {}
            return []
        self._held = self._sharing(head)
        for one in head:
            if one.number in self._held:  # what they wait for may be there by now
                self.order.update(one, about.prefill(one.about, True))
        if self._held:
            self._held = self._sharing(head)
        return [one.about for one in head if one.number in self._held]

    def _sharing(self, head: Sequence[Waiting]) -> dict[int, int | None]:
        about = self._requests
        return deferred(
            [one for one in head if one.number not in self._passed],
            lambda request: about.path(request)[0],
            [about.path(request)[0] for request in self._computing.values()],
            about.path(head[0].about)[1],
            about.step_tokens_worth(),
        )

    def nothing_to_do(self) -> None:
        """Without those who were left out there was nothing to compute: nobody waits again for
        those that they wait for."""
        self._passed.update(n for n in self._held.values() if n is not None)
        self._computing.clear()

    def _leave(self, present: set[Hashable]) -> None:
        """Who is not in the queue any longer was let in, or given up."""
        if present == self._waiting.keys():
            return
        before: list[int] = []
        for waiting in self._last:
            key = self._requests.key(waiting.about)
            if key in present:
                before.append(waiting.number)
                continue
            del self._waiting[key]
            self._passed.discard(waiting.number)
            if self._requests.given_up(waiting.about):
                self.order.remove(waiting)
            else:
                self.order.let_in([waiting])
                if self._defers:
                    self._computing[key] = waiting.about
                    self._passed.update(n for n in before if n not in self._held)
                    before.clear()

    def _refresh(self) -> None:
        """Look a few requests up again: those at the head, and of the others some in turn."""
        size = len(self._last)
        chosen = list(islice(self._last, HEAD_LOOKUPS))
        for _ in range(min(ROUND_LOOKUPS, size - len(chosen))):
            self._round = max((self._round + 1) % size, HEAD_LOOKUPS)
            chosen.append(self._last[self._round])
        for waiting in chosen:
            if self._requests.key(waiting.about) in self._waiting:
                self.order.update(waiting, self._requests.prefill(waiting.about, True))
