"""The order of the queue: SGLang's ``--schedule-policy`` (``managers/schedule_policy.py``).

To add one, write a class with ``order`` and name it in ``QUEUE_ORDERS``; ``SystemConfig`` takes
the name as ``schedule_policy`` and the class's arguments as ``schedule_policy_config``.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from canopy_lab.sim.system.job import SimulatedRequest
from sglang_canopy.schedule.arranged import Arranged
from sglang_canopy.schedule.bounded_shortest import (
    LEAST_S as LEAST_BUDGET_S,
)
from sglang_canopy.schedule.bounded_shortest import MAX_WAIT_FACTOR, OWN, BoundedShortest
from sglang_canopy.schedule.prefill_cost import LEAST_S, Prefill

MATCHED_AT_MOST = 128
"""Beyond this many waiting requests SGLang's ``lpm`` and ``hrrn`` leave the queue as it is
(``WAITING_QUEUE_PREFIX_MATCH_MAX``)."""
IN_BATCH_TOKENS = 32
"""A request with no more than this cached waits for one before it in the queue that shares as
much (``IN_BATCH_PREFIX_CACHING_CHECK_THRESHOLD`` and ``..._DEPRIORITIZE_THRESHOLD``)."""


class Cached(NamedTuple):
    """Tokens of a prompt that are found on the device, and beyond them on the host."""

    device: int
    host: int


class QueueView(Protocol):
    """What an order may ask about the instance."""

    now: float
    """Seconds, on the simulation's clock."""
    processed_tokens: int
    """Tokens prefilled so far; ``job.tokens_before`` is what it was when a job began to wait."""
    step_tokens: int
    """Tokens that one step takes at most."""

    def cached(self, job: SimulatedRequest) -> Cached:
        """Look ``job`` up, in whole pages and without its last token, as SGLang's
        ``match_prefix`` does: what it finds is protected or touched (``waiting.py``)."""

    def marginal_s(self, new_tokens: int, context_tokens: int) -> float:
        """Seconds that a prefill of ``new_tokens`` behind ``context_tokens`` adds to full steps."""

    def step_tokens_worth(self) -> float:
        """Tokens whose prefill takes as long as a step costs beside its tokens."""

    def load_s(self, tokens: int) -> float:
        """Seconds to bring ``tokens`` from the host, without what is in the way."""


class QueueOrder(Protocol):
    """Orders the waiting jobs of one instance. One object an instance."""

    def order(
        self, waiting: Sequence[SimulatedRequest], view: QueueView
    ) -> Sequence[SimulatedRequest]:
        """``waiting`` as it should be tried, asked before every prefill step that may let
        somebody in.

        ``waiting`` is in the order that was returned last, with whoever came since at its end.
        A job has ``arrival`` (s), ``prompt`` and ``output`` (tokens; only an oracle reads
        ``output``), ``request`` (``tenant``, ``conversation``, ...) and ``index``, its ordinal in
        the trace. All and only the given jobs must be returned.
        """


class FirstComeFirstServed:
    """``fcfs``: in order of arrival, SGLang's default."""

    def order(
        self, waiting: Sequence[SimulatedRequest], view: QueueView
    ) -> Sequence[SimulatedRequest]:
        return waiting


class LongestPrefixMatch:
    """``lpm``: most cached tokens first; a longer queue than 128 is left as it is."""

    def order(
        self, waiting: Sequence[SimulatedRequest], view: QueueView
    ) -> Sequence[SimulatedRequest]:
        if len(waiting) > MATCHED_AT_MOST:
            return waiting
        matched, later = matches(waiting, view)
        return sorted(waiting, key=lambda j: (j in later, -matched[j]))


class HighestResponseRatioNext:
    """``hrrn``: most tokens prefilled since it came, for each token that it needs itself."""

    def order(
        self, waiting: Sequence[SimulatedRequest], view: QueueView
    ) -> Sequence[SimulatedRequest]:
        if len(waiting) > MATCHED_AT_MOST:
            return waiting
        matched, later = matches(waiting, view)

        def rank(job: SimulatedRequest) -> tuple[bool, float, int]:
            uncached = max(job.target - matched[job], 1)
            waited = view.processed_tokens - job.tokens_before
            return job in later, -waited / uncached, job.index

        return sorted(waiting, key=rank)


class ShortestPrefillFirst:
    """``shortest-prefill-first``: fewest uncached tokens first. SGLang marks it experimental.

    Shorter ones share the steps of a long prompt under way. SGLang keeps no room for the rest of
    that prompt while they do; here it is kept for every order, which is kinder to this one.
    """

    def order(
        self, waiting: Sequence[SimulatedRequest], view: QueueView
    ) -> Sequence[SimulatedRequest]:
        matched, later = matches(waiting, view)
        self._work = {job: max(1, job.target - matched[job]) for job in waiting}
        return sorted(waiting, key=lambda j: (j in later, j.target - matched[j], j.arrival))

    def share(
        self, rest: int, step_tokens: int, page: int, waiting: Sequence[SimulatedRequest]
    ) -> tuple[Sequence[SimulatedRequest], int | None]:
        """``waiting`` as it should be tried beside a prompt of which ``rest`` tokens are left, and
        how many of the step's that prompt takes; ``None``: as many as it can.

        SGLang's ``shortest_prefill_chunk_limit``."""
        held = 0
        for job in waiting if step_tokens >= 2 * page else ():
            work = self._work[job]
            pages = -(-work // page) * page
            if work >= rest or held + pages > step_tokens - page:
                break
            held += pages
        return waiting, (step_tokens - held) // page * page if held else None


class RandomOrder:
    """``random``: shuffled before every step."""

    def __init__(self, seed: int = 0) -> None:
        self._draw = random.Random(seed)

    def order(
        self, waiting: Sequence[SimulatedRequest], view: QueueView
    ) -> Sequence[SimulatedRequest]:
        shuffled = list(waiting)
        self._draw.shuffle(shuffled)
        return shuffled


class BoundedShortestFirst:
    """``bounded-shortest``: the object that orders a server's queue (``--canopy-queue-order``).

    Costs are the profile's; a server fits its own. It sees what the server's sees: a request is
    looked up when it comes, and a bounded number of them in each pass.
    """

    def __init__(
        self,
        max_wait_factor: float = MAX_WAIT_FACTOR,
        own: float = OWN,
        least_s: float = LEAST_BUDGET_S,
        defer: bool = True,
        share: bool = True,
    ) -> None:
        self._view: QueueView | None = None
        self._shares = share
        self.deferred: frozenset[SimulatedRequest] = frozenset()
        """Who is left out of this step."""
        order = BoundedShortest(self, max_wait_factor, own, least_s)
        self._arranged = Arranged(order, self, defer)

    def order(
        self,
        waiting: Sequence[SimulatedRequest],
        view: QueueView,
        chunked: SimulatedRequest | None = None,
    ) -> Sequence[SimulatedRequest]:
        self._view = view
        return self._arranged.arrange(waiting, chunked)

    def defer(self, computing: Sequence[SimulatedRequest]) -> Sequence[SimulatedRequest]:
        """Choose who is left out of this step. ``computing``: the job that is in the middle of its
        chunks. Returns the waiting jobs in their order, which this may change."""
        self.deferred = frozenset(self._arranged.deferred(computing))
        return self._arranged.arranged()

    def share(
        self, rest: int, step_tokens: int, page: int, waiting: Sequence[SimulatedRequest]
    ) -> tuple[Sequence[SimulatedRequest], int | None]:
        """``ShortestPrefillFirst.share``: ``waiting`` with those first who share the step."""
        if not self._shares:
            return waiting, None
        sharing, later = self._arranged.sharing(rest, step_tokens, page, lambda _job: True)
        if not sharing:
            return waiting, None
        self.deferred = frozenset(later)
        held = sum(-(-self.prefill(job, True).uncached // page) * page for job in sharing)
        return self._arranged.arranged(), max(page, (step_tokens - held) // page * page)

    def let_in(self, jobs: Sequence[SimulatedRequest]) -> None:
        """These are prefilled from now on."""
        self._arranged.let_in(jobs)

    def over(self, job: SimulatedRequest) -> None:
        """``job`` is answered."""
        self._arranged.over((id(job),))

    def nothing_to_do(self) -> None:
        """Without those who were left out there was nothing to prefill."""
        self._arranged.nothing_to_do()

    def seconds(self, request: Prefill) -> float:
        """What ``request`` costs."""
        assert self._view is not None
        loading = self._view.load_s(request.loaded) if request.loaded else 0.0
        return max(self._view.marginal_s(request.uncached, request.cached) + loading, LEAST_S)

    def tenant(self, job: SimulatedRequest) -> str | None:
        return job.request.tenant

    def urgency(self, job: SimulatedRequest) -> int:
        return 0

    def prefill(self, job: SimulatedRequest, look_up: bool) -> Prefill:
        assert self._view is not None
        found = self._view.cached(job)
        cached = found.device + found.host
        return Prefill(job.target - cached, cached, found.host)

    def path(self, job: SimulatedRequest) -> tuple[tuple[int, ...], int]:
        return job.path, job.request.block_tokens

    def rest(self, job: SimulatedRequest) -> Prefill:
        return Prefill(job.target - job.done, job.done)

    def step_tokens_worth(self) -> float:
        assert self._view is not None
        return self._view.step_tokens_worth()

    def step_tokens(self) -> int:
        assert self._view is not None
        return self._view.step_tokens


def matches(
    waiting: Sequence[SimulatedRequest], view: QueueView
) -> tuple[dict[SimulatedRequest, int], set[SimulatedRequest]]:
    """Cached tokens of each job on device and host, and those that wait for one before them.

    SGLang's ``_compute_prefix_matches``: of several requests that share what nobody has computed
    yet, only the first keeps its place, so that the others find it cached.
    """
    matched: dict[SimulatedRequest, int] = {}
    later: set[SimulatedRequest] = set()
    begun: set[Hashable] = set()
    for job in waiting:
        found = view.cached(job)
        matched[job] = found.device + found.host
        # Block ids are chained: an equal id is an equal prefix.
        last = -(-IN_BATCH_TOKENS // max(job.request.block_tokens, 1)) - 1
        if found.device <= IN_BATCH_TOKENS and last < len(job.path):
            if job.path[last] in begun:
                later.add(job)
            else:
                begun.add(job.path[last])
    return matched, later


QUEUE_ORDERS: Mapping[str, Callable[..., QueueOrder]] = {
    "fcfs": FirstComeFirstServed,
    "lpm": LongestPrefixMatch,
    "hrrn": HighestResponseRatioNext,
    "shortest-prefill-first": ShortestPrefillFirst,
    "random": RandomOrder,
    "bounded-shortest": BoundedShortestFirst,
}
"""By the name that ``--schedule-policy`` takes."""


def make_queue_order(name: str, config: Mapping[str, Any]) -> QueueOrder:
    """The order of that name, with its arguments; raises ``KeyError`` or ``TypeError``."""
    return QUEUE_ORDERS[name](**config)
