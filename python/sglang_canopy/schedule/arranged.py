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
from sglang_canopy.schedule.cost_queue import WaitingRequest

HEAD_LOOKUPS = 8
"""Requests at the head of the queue whose prefix match is refreshed in every pass."""
ROUND_LOOKUPS = 4
"""Further requests refreshed per pass, round-robin."""
SHARER_CANDIDATES = 128
"""Requests at the head of the queue considered for sharing a step with a chunked prefill."""

CHECKED_STEPS = 2
"""Steps whose tokens are checked against the overtaking budgets. More than one, because a refreshed
prefix match may be longer, so that a step admits more requests."""

T = TypeVar("T")
T_in = TypeVar("T_in", contravariant=True)


class RequestView(Protocol[T_in]):
    """A scheduler's view of its requests, implemented by the server and the simulator."""

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


class ArrangedQueue(Generic[T]):
    """The scheduler's waiting queue, sorted by ``bounded_queue``."""

    def __init__(self, bounded_queue: BoundedShortest, view: RequestView[T]) -> None:
        self.bounded_queue = bounded_queue
        self._view = view
        self._waiting: dict[T, WaitingRequest] = {}
        self._admitted: dict[T, WaitingRequest] = {}
        """Admitted requests, which may be retracted."""
        self._in_order: list[T] = []
        """The waiting requests in admission order, as of the latest pass."""
        self._lone_request: T | None = None
        """A new request that waits alone. SGLang matches it when it admits it: it is not looked up, and
        has neither cost nor budget, unless it still waits in the next pass."""
        self._next_lookup = 0

    def __len__(self) -> int:
        return len(self._waiting) + (self._lone_request is not None)

    def requests(self) -> list[T]:
        """Return the waiting requests, and the admitted ones that are not known to have ended."""
        alone = () if self._lone_request is None else (self._lone_request,)
        return [*self._waiting, *alone, *self._admitted]

    def arrange(self, queue: Sequence[T], chunked: T | None = None) -> list[T]:
        """Return ``queue`` in admission order. ``chunked``: the request that is being chunked."""
        waiting = self._waiting
        new = [request for request in queue if request not in waiting]
        if len(waiting) + len(new) > len(queue):
            present = set(queue)
            for aborted in [request for request in waiting if request not in present]:
                self.forget(aborted)
        chunked_prompt = None if chunked is None else self._admitted.get(chunked)
        self.bounded_queue.set_chunked_prompt(chunked_prompt)
        if len(self._in_order) > len(waiting):  # some have left
            self._in_order = [request for request in self._in_order if request in waiting]
        previous, self._lone_request = self._lone_request, None
        if len(queue) == len(new) == 1 and chunked is None:
            (only,) = new
            if only is not previous and only not in self._admitted:
                self._lone_request, self._in_order = only, new
                return self.current()
        for request in sorted(new, key=lambda request: request is not previous):  # the older first
            self._view.match(request)
            self._enqueue(request)
        self.bounded_queue.set_time(self._view.time_s())
        if len(queue) < 2:
            self._in_order = list(queue)
            return self.current()
        self._refresh()
        self._in_order = [waiting.request for waiting in self.bounded_queue.in_order()]
        return self.current()

    def current(self) -> list[T]:
        """Return the current order, including changes made by ``share_step``."""
        return list(self._in_order)

    def _enqueue(self, request: T) -> None:
        view, waiting = self._view, self._admitted.pop(request, None)
        prefill = view.prefill(request, waiting is not None)  # retracted: its match is old
        if waiting is not None:
            self.bounded_queue.requeue(waiting, prefill)
        else:
            tenant, urgency = view.tenant(request), view.urgency(request)
            waiting = self.bounded_queue.add(prefill, tenant, urgency, request)
        self._waiting[request] = waiting

    def admit(self, requests: Collection[T]) -> None:
        """Record admitted requests."""
        if self._lone_request is not None and self._lone_request in requests:
            self._enqueue(self._lone_request)
            self._lone_request = None
        admitted = self._waiting.keys() & set(requests)
        if not admitted:
            return
        entered = [self._waiting.pop(request) for request in self._in_order if request in admitted]
        self._in_order = [request for request in self._in_order if request not in admitted]
        self._admitted |= {waiting.request: waiting for waiting in entered}
        self.bounded_queue.admit(entered)

    def forget(self, request: T) -> bool:
        """Drop a request that ended; return whether it was admitted."""
        if request is self._lone_request:
            self._lone_request, self._in_order = None, []
            return False
        waiting = self._waiting.pop(request, None)
        if waiting is not None:
            self.bounded_queue.remove(waiting)
            # The next pass updates ``_in_order``: a search here would take a pass for each abort.
            if not self._waiting:
                self._in_order = []
            return False
        waiting = self._admitted.pop(request, None)
        if waiting is not None and waiting is self.bounded_queue.chunked_prompt:
            self.bounded_queue.set_chunked_prompt(None)
        return waiting is not None

    def over_budget(self) -> list[T]:
        """Return the requests at the head of the order that would overdraw a budget."""
        tokens = CHECKED_STEPS * self._view.step_tokens()
        overdrawing = self.bounded_queue.over_budget(self._waiting_in_order(), tokens)
        return [waiting.request for waiting in overdrawing]

    def share_step(
        self, chunk_tokens: int, step_tokens: int, page_tokens: int, free_tokens: float
    ) -> tuple[list[T], int] | None:
        """Move to the head of the order requests that share a step with the chunked prefill.

        Sharers are shorter than the ``chunk_tokens`` left, have at least the same priority, and use
        up to half of the step, or more if the chunk leaves more. Their prompts and answers need at
        most ``free_tokens`` of memory. Return requests that would overdraw a budget once the sharers
        are admitted, and the tokens left for the chunked prefill; ``None`` without sharers.
        """
        shared_tokens = step_tokens - min(max(page_tokens, step_tokens // 2), chunk_tokens)
        chunk_limit = step_tokens

        def shares(waiting: WaitingRequest) -> bool:
            nonlocal chunk_limit, free_tokens, shared_tokens
            tokens = waiting.prefill.uncached
            padded_tokens = -(-tokens // page_tokens) * page_tokens
            if tokens >= chunk_tokens or padded_tokens > shared_tokens:
                return False
            prefill = self._view.prefill(waiting.request, True)
            needed_tokens = prefill.uncached + prefill.reserved + page_tokens
            needed_tokens += self._view.unlocked_tokens(waiting.request)
            if prefill.uncached > tokens or needed_tokens > free_tokens:  # its prefix shrank
                return False
            shared_tokens -= padded_tokens
            chunk_limit -= -(-prefill.uncached // page_tokens) * page_tokens
            free_tokens -= needed_tokens
            return True

        head: Iterator[WaitingRequest] = islice(self._waiting_in_order(), SHARER_CANDIDATES)
        if (prompt := self.bounded_queue.chunked_prompt) is not None:
            head = (waiting for waiting in head if waiting.urgency >= prompt.urgency)
        sharers = {waiting.request: None for waiting in self.bounded_queue.select(head, shares)}
        if not sharers:
            return None
        self._in_order = [*sharers, *(each for each in self._in_order if each not in sharers)]
        return self.over_budget(), max(page_tokens, chunk_limit // page_tokens * page_tokens)

    def _waiting_in_order(self) -> Iterator[WaitingRequest]:
        """Yield the waiting requests in the current order."""
        return (self._waiting[request] for request in self._in_order if request in self._waiting)

    def _refresh(self) -> None:
        """Look up the prefixes of the first requests, and of a few others in turn."""
        count = len(self._in_order)
        chosen = self._in_order[:HEAD_LOOKUPS]
        for _ in range(min(ROUND_LOOKUPS, count - len(chosen))):
            self._next_lookup = max((self._next_lookup + 1) % count, HEAD_LOOKUPS)
            chosen.append(self._in_order[self._next_lookup])
        for request in chosen:
            self.bounded_queue.update(self._waiting[request], self._view.prefill(request, True))
