"""Queue orders: SGLang's ``--schedule-policy`` (``managers/schedule_policy.py``) and Canopy's.

To add an order, implement ``QueueOrder`` and list the class in ``QUEUE_ORDERS``. ``SystemConfig``
takes its name as ``schedule_policy`` and its arguments as ``schedule_policy_config``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from canopy_lab.sim.system.job import SimulatedRequest
from sglang_canopy.schedule.arranged import ArrangedQueue
from sglang_canopy.schedule.bounded_shortest import BASE_BUDGET_S, COST_FACTOR, BoundedShortest
from sglang_canopy.schedule.cost import MIN_COST_S, Prefill

MAX_MATCHED_JOBS = 128
"""SGLang's ``lpm`` and ``hrrn`` do not sort longer queues (``WAITING_QUEUE_PREFIX_MATCH_MAX``)."""
MAX_IN_BATCH_TOKENS = 32
"""A request with at most this many cached tokens waits for an earlier request that shares more
(``IN_BATCH_PREFIX_CACHING_CHECK_THRESHOLD`` and ``..._DEPRIORITIZE_THRESHOLD``)."""

Jobs = Sequence[SimulatedRequest]


class CachedTokens(NamedTuple):
    """Cached tokens of a prompt: on the device, and further tokens on the host."""

    device: int
    host: int


class QueueView(Protocol):
    """The instance, as seen by a queue order."""

    now: float
    """Seconds, on the simulation's clock."""
    processed_tokens: int
    """Tokens prefilled so far; ``job.tokens_before`` is its value at the job's arrival."""
    step_tokens: int
    """Token limit of one step."""
    unbacked_tokens: float
    """Tokens of the device's KV if what it evicts is lost; infinity with a host."""

    def match_cached(self, job: SimulatedRequest) -> CachedTokens:
        """Match ``job`` in whole pages without its last token, as SGLang's ``match_prefix`` does.

        The match is protected or touched (``waiting.py``).
        """

    def marginal_s(self, new_tokens: int, context_tokens: int) -> float:
        """Return the marginal seconds of a prefill of ``new_tokens`` after ``context_tokens``."""

    def load_s(self, tokens: int) -> float:
        """Return the seconds to load ``tokens`` from the host, without queueing."""


class QueueOrder(Protocol):
    """Orders the waiting jobs of one instance; one object per instance."""

    def order(self, waiting: Jobs, view: QueueView) -> Jobs:
        """Return ``waiting`` in admission order; called before each prefill step that may admit.

        ``waiting`` has the order returned last, with new jobs at the end. A job has ``arrival_s`` (s),
        ``prompt_tokens`` and ``output_tokens`` (which only an oracle reads), ``request`` (``tenant``,
        ``conversation``, ...) and ``index`` in the trace. Return a permutation of ``waiting``.
        """


class FirstComeFirstServed:
    """``fcfs``: in order of arrival, SGLang's default."""

    def order(self, waiting: Jobs, view: QueueView) -> Jobs:
        return waiting


class LongestPrefixMatch:
    """``lpm``: most cached tokens first; queues longer than 128 stay in order."""

    def order(self, waiting: Jobs, view: QueueView) -> Jobs:
        if len(waiting) > MAX_MATCHED_JOBS:
            return waiting
        cached, deferred = match_waiting(waiting, view)
        return sorted(waiting, key=lambda job: (job in deferred, -cached[job]))


class HighestResponseRatioNext:
    """``hrrn``: most tokens prefilled since arrival, per uncached token of the job."""

    def order(self, waiting: Jobs, view: QueueView) -> Jobs:
        if len(waiting) > MAX_MATCHED_JOBS:
            return waiting
        cached, deferred = match_waiting(waiting, view)

        def rank(job: SimulatedRequest) -> tuple[bool, float, int]:
            uncached_tokens = max(job.target_tokens - cached[job], 1)
            waited_tokens = view.processed_tokens - job.tokens_before
            return job in deferred, -waited_tokens / uncached_tokens, job.index

        return sorted(waiting, key=rank)


class ShortestPrefillFirst:
    """``shortest-prefill-first``: fewest uncached tokens first. SGLang marks it experimental.

    Shorter jobs share the steps of a chunked prefill. SGLang then reserves no memory for the rest of
    that prompt; the simulator does for every order, which favours this one.
    """

    def order(self, waiting: Jobs, view: QueueView) -> Jobs:
        cached, deferred = match_waiting(waiting, view)
        self._uncached_tokens = {j: max(1, j.target_tokens - cached[j]) for j in waiting}
        return sorted(waiting, key=lambda j: (j in deferred, self._uncached_tokens[j], j.arrival_s))

    def share_step(
        self, remaining_tokens: int, step_tokens: int, page: int, waiting: Jobs
    ) -> tuple[Jobs, int | None]:
        """Return jobs in order and the step's tokens for the chunked prefill (``None``: no limit).

        ``remaining_tokens``: of its prompt; ``page``: tokens. SGLang's ``shortest_prefill_chunk_limit``.
        """
        shared_tokens = 0
        for job in waiting if step_tokens >= 2 * page else ():
            uncached = self._uncached_tokens[job]
            paged_tokens = -(-uncached // page) * page
            if uncached >= remaining_tokens or shared_tokens + paged_tokens > step_tokens - page:
                break
            shared_tokens += paged_tokens
        return waiting, (step_tokens - shared_tokens) // page * page if shared_tokens else None


class BoundedShortestFirst:
    """``bounded-shortest``: the server's own queue order (``--canopy-queue-order``).

    Costs come from the profile; a server fits its own. As on a server, requests are matched at
    arrival, and a bounded number again in each pass.
    """

    def __init__(
        self,
        cost_factor: float = COST_FACTOR,
        base_budget_s: float = BASE_BUDGET_S,
        share: bool = True,
    ) -> None:
        self._view: QueueView | None = None
        self._shares = share
        self.deferred: frozenset[SimulatedRequest] = frozenset()
        """Jobs that would overdraw a budget in this step."""
        self._arranged = ArrangedQueue(BoundedShortest(self, cost_factor, base_budget_s), self)

    def order(
        self, waiting: Jobs, view: QueueView, chunked: SimulatedRequest | None = None
    ) -> Jobs:
        self._view = view
        self._arranged.bounded_queue.unbacked_tokens = view.unbacked_tokens
        return self._arranged.arrange(waiting, chunked)

    def defer(self) -> None:
        """Defer jobs that would overdraw a budget."""
        self.deferred = frozenset(self._arranged.over_budget())

    def share_step(
        self, remaining_tokens: int, step_tokens: int, page: int, waiting: Jobs
    ) -> tuple[Jobs, int | None]:
        """Return what ``ShortestPrefillFirst.share`` returns. Jobs that share the step come first."""
        if not self._shares:
            return waiting, None
        shared = self._arranged.share_step(remaining_tokens, step_tokens, page, math.inf)
        if shared is None:
            return waiting, None
        deferred, limit = shared
        self.deferred = frozenset(deferred)
        return self._arranged.current(), limit

    def admit(self, jobs: Jobs) -> None:
        """Remove admitted jobs."""
        self._arranged.admit(jobs)

    def forget(self, job: SimulatedRequest) -> None:
        """Forget a finished job."""
        self._arranged.forget(job)

    def seconds(self, request: Prefill) -> float:
        """Return the cost of ``request``, in seconds."""
        assert self._view is not None
        loading_s = self._view.load_s(request.loaded) if request.loaded else 0.0
        return max(self._view.marginal_s(request.uncached, request.cached) + loading_s, MIN_COST_S)

    def tenant(self, job: SimulatedRequest) -> str | None:
        return job.request.tenant

    def urgency(self, job: SimulatedRequest) -> int:
        return 0

    def match(self, job: SimulatedRequest) -> None:
        """Do nothing: ``prefill`` matches."""

    def prefill(self, job: SimulatedRequest, look_up: bool) -> Prefill:
        assert self._view is not None
        hits = self._view.match_cached(job)
        cached = hits.device + hits.host
        return Prefill(job.target_tokens - cached, cached, hits.host)

    def unlocked_tokens(self, job: SimulatedRequest) -> int:
        """Return 0: the simulator reserves memory itself."""
        return 0

    def step_tokens(self) -> int:
        assert self._view is not None
        return self._view.step_tokens

    def time_s(self) -> float:
        assert self._view is not None
        return self._view.now


def match_waiting(
    waiting: Jobs, view: QueueView
) -> tuple[dict[SimulatedRequest, int], set[SimulatedRequest]]:
    """Return the cached tokens of each job, and the jobs that wait for an earlier one.

    SGLang's ``_compute_prefix_matches``: of the requests that share an uncomputed prefix, only the
    first keeps its position, so that the others hit it.
    """
    cached_tokens: dict[SimulatedRequest, int] = {}
    deferred: set[SimulatedRequest] = set()
    seen_blocks: set[Hashable] = set()
    for job in waiting:
        hits = view.match_cached(job)
        cached_tokens[job] = hits.device + hits.host
        # Block ids are chained: an equal id is an equal prefix.
        block_index = -(-MAX_IN_BATCH_TOKENS // max(job.request.block_tokens, 1)) - 1
        if hits.device <= MAX_IN_BATCH_TOKENS and block_index < len(job.path):
            if job.path[block_index] in seen_blocks:
                deferred.add(job)
            else:
                seen_blocks.add(job.path[block_index])
    return cached_tokens, deferred


QUEUE_ORDERS: dict[str, Callable[..., QueueOrder]] = {
    "fcfs": FirstComeFirstServed,
    "lpm": LongestPrefixMatch,
    "hrrn": HighestResponseRatioNext,
    "shortest-prefill-first": ShortestPrefillFirst,
    "bounded-shortest": BoundedShortestFirst,
}
"""Orders by their name in ``--schedule-policy``."""


def make_queue_order(name: str, config: Mapping[str, Any]) -> QueueOrder:
    """Make an order by name. Raises ``KeyError`` or ``TypeError``."""
    return QUEUE_ORDERS[name](**config)
