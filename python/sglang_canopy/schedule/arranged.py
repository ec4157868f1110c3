"""Keep a bounded shortest-first order in step with a scheduler's own waiting queue.

Before each pass the scheduler (live or simulated) gets its queue in order; afterwards it reports
the admitted requests. A request that disappears without a report was aborted. Each pass refreshes
the prefix match of a few requests, because prefixes are computed and evicted in the meantime.

Requests are identified by object, not by ``rid``: clients choose rids and may reuse them.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterator, Sequence
from itertools import islice
from typing import Generic, Protocol, TypeVar

from sglang_canopy.schedule.bounded_shortest import BoundedShortest
from sglang_canopy.schedule.cost import Prefill
from sglang_canopy.schedule.cost_queue import Waiting

HEAD_LOOKUPS = 8
"""Requests at the head of the queue whose prefix match is refreshed in every pass."""
ROUND_LOOKUPS = 4
"""Further requests refreshed per pass, round-robin."""
SHARERS = 128
"""Requests at the head of the queue considered for sharing a step with a chunked prefill."""

STEPS = 2
"""Steps' worth of tokens checked against the overtaking budgets. More than one, because a refreshed
prefix match may be longer and let more requests into a step."""

T = TypeVar("T")
T_in = TypeVar("T_in", contravariant=True)


class Requests(Protocol[T_in]):
    """Scheduler-specific view of a request, implemented by the server and the simulator."""

    def tenant(self, request: T_in) -> Hashable:
        """Return the tenant to charge for it (``tenant.ChargedTenants``)."""

    def urgency(self, request: T_in) -> int:
        """Return the priority; higher priorities always go first."""

    def match(self, request: T_in) -> None:
        """Match a waiting request that has no prefix match yet. A match of a running one would replace
        the node that it has locked."""

    def prefill(self, request: T_in, look_up: bool) -> Prefill:
        """Return the prefill still to do. ``look_up``: by the present tree; otherwise by the latest
        prefix match."""

    def unlocked_tokens(self, request: T_in) -> int:
        """Return the cached tokens of its prefix that are evictable, or not on the device."""

    def step_tokens(self) -> int:
        """Return the token limit of one step."""

    def time_s(self) -> float:
        """Return the time in seconds, equal on all ranks."""


class Arranged(Generic[T]):
    """The scheduler's waiting queue, sorted by ``shortest``."""

    def __init__(self, shortest: BoundedShortest, requests: Requests[T]) -> None:
        self.shortest = shortest
        self._requests = requests
        self._waiting: dict[T, Waiting] = {}
        self._admitted: dict[T, Waiting] = {}
        """Admitted requests, which may be retracted."""
        self._in_order: list[T] = []
        """The waiting requests in admission order, as of the latest pass."""
        self._alone: T | None = None
        """A new request that waits alone. SGLang matches it when it admits it: it is not looked up, and
        has neither cost nor budget, unless it still waits in the next pass."""
        self._next_lookup = 0

    def __len__(self) -> int:
        return len(self._waiting) + (self._alone is not None)

    def requests(self) -> list[T]:
        """Return the waiting requests, and the admitted ones that are not known to have ended."""
        alone = () if self._alone is None else (self._alone,)
        return [*self._waiting, *alone, *self._admitted]

    def arrange(self, queue: Sequence[T], chunked: T | None = None) -> list[T]:
        """Return ``queue`` in admission order. ``chunked``: the request that is being chunked."""
        waiting = self._waiting
        new = [request for request in queue if request not in waiting]
        if len(waiting) + len(new) > len(queue):
            present = set(queue)
            for aborted in [request for request in waiting if request not in present]:
                self.forget(aborted)
        self.shortest.set_chunked_prompt(None if chunked is None else self._admitted.get(chunked))
        if len(self._in_order) > len(waiting):  # some have left
            self._in_order = [request for request in self._in_order if request in waiting]
        previous, self._alone = self._alone, None
        if len(queue) == len(new) == 1 and chunked is None:
            (only,) = new
            if only is not previous and only not in self._admitted:
                self._alone, self._in_order = only, new
                return self.current()
        for request in sorted(new, key=lambda request: request is not previous):  # the older first
            self._requests.match(request)
            self._enqueue(request)
        self.shortest.set_time(self._requests.time_s())
        if len(queue) < 2:
            self._in_order = list(queue)
            return self.current()
        self._refresh()
        self._in_order = [entry.request for entry in self.shortest.in_order()]
        return self.current()

    def current(self) -> list[T]:
        """Return the current order, including changes made by ``share_step``."""
        return list(self._in_order)

    def _enqueue(self, request: T) -> None:
        requests, waiting = self._requests, self._admitted.pop(request, None)
        prefill = requests.prefill(request, waiting is not None)  # retracted: its match is old
        if waiting is not None:
            self.shortest.requeue(waiting, prefill)
        else:
            tenant, urgency = requests.tenant(request), requests.urgency(request)
            waiting = self.shortest.add(prefill, tenant, urgency, request)
        self._waiting[request] = waiting

    def admit(self, requests: Collection[T]) -> None:
        """Record admitted requests."""
        if self._alone is not None and self._alone in requests:
            self._enqueue(self._alone)
            self._alone = None
        admitted = self._waiting.keys() & set(requests)
        if not admitted:
            return
        entered = [self._waiting.pop(request) for request in self._in_order if request in admitted]
        self._in_order = [request for request in self._in_order if request not in admitted]
        self._admitted |= {waiting.request: waiting for waiting in entered}
        self.shortest.admit(entered)

    def forget(self, request: T) -> bool:
        """Drop a request that ended; return whether it was admitted."""
        if request is self._alone:
            self._alone, self._in_order = None, []
            return False
        waiting = self._waiting.pop(request, None)
        if waiting is not None:
            self.shortest.remove(waiting)
            # ``_in_order`` follows in the next pass: a search here is a pass for each of many aborts.
            if not self._waiting:
                self._in_order = []
            return False
        waiting = self._admitted.pop(request, None)
        if waiting is not None and waiting is self.shortest.chunked_prompt:
            self.shortest.set_chunked_prompt(None)
        return waiting is not None

    def over_budget(self) -> list[T]:
        """Return the requests at the head of the order that would overdraw a budget."""
        tokens = STEPS * self._requests.step_tokens()
        return [entry.request for entry in self.shortest.over_budget(self._entries(), tokens)]

    def share_step(
        self, chunk_tokens: int, step_tokens: int, page: int, free_tokens: float
    ) -> tuple[list[T], int] | None:
        """Move to the head of the order requests that share a step with the chunked prefill.

        Sharers are shorter than the ``chunk_tokens`` left, have at least the same priority, and use
        up to half of the step, or more if the chunk leaves more. Their prompts and answers need at
        most ``free_tokens`` of memory. Return requests that would overdraw a budget once the sharers
        are admitted, and the tokens left for the chunked prefill; ``None`` without sharers.
        """
        shared_tokens = step_tokens - min(max(page, step_tokens // 2), chunk_tokens)
        chunk_limit = step_tokens

        def shares(waiting: Waiting) -> bool:
            nonlocal chunk_limit, free_tokens, shared_tokens
            tokens = waiting.prefill.uncached
            pages = -(-tokens // page) * page
            if tokens >= chunk_tokens or pages > shared_tokens:
                return False
            now = self._requests.prefill(waiting.request, True)
            needed = now.uncached + now.reserved + page
            needed += self._requests.unlocked_tokens(waiting.request)
            if now.uncached > tokens or needed > free_tokens:  # its prefix shrank meanwhile
                return False
            shared_tokens -= pages
            chunk_limit -= -(-now.uncached // page) * page
            free_tokens -= needed
            return True

        head: Iterator[Waiting] = islice(self._entries(), SHARERS)
        if (prompt := self.shortest.chunked_prompt) is not None:
            head = (waiting for waiting in head if waiting.urgency >= prompt.urgency)
        sharers = {waiting.request: None for waiting in self.shortest.select(head, shares)}
        if not sharers:
            return None
        self._in_order = [*sharers, *(each for each in self._in_order if each not in sharers)]
        return self.over_budget(), max(page, chunk_limit // page * page)

    def _entries(self) -> Iterator[Waiting]:
        """Yield the entries of the waiting requests in the current order."""
        return (self._waiting[request] for request in self._in_order if request in self._waiting)

    def _refresh(self) -> None:
        size = len(self._in_order)
        chosen = list(islice(self._in_order, HEAD_LOOKUPS))
        for _ in range(min(ROUND_LOOKUPS, size - len(chosen))):
            self._next_lookup = max((self._next_lookup + 1) % size, HEAD_LOOKUPS)
            chosen.append(self._in_order[self._next_lookup])
        for request in chosen:
            self.shortest.update(self._waiting[request], self._requests.prefill(request, True))
