"""Bounded shortest-first order: admit the cheapest request that every overtaking budget allows.

Cost is the predicted seconds of the server that a request takes: its prefill, with KV loading
(``cost.py``), and its answer, as a share of the running requests or of the KV. If the waiting prompts
would fill the pool and no lower tier keeps what it evicts, the order is by net cost: less the seconds
that cached KV saves, which may be evicted while its request waits.
Shortest-first minimises the mean wait but starves long requests, so each request gets an overtaking
budget on arrival::

    B = lambda c + beta    seconds of younger work that may be admitted before it

where c is its own cost, lambda = ``COST_FACTOR`` and beta = ``BASE_BUDGET_S``. A request may not overdraw the
budget of an older request; the oldest may always go. A chunked prefill keeps its budget for requests
that share its steps.

Bound: regardless of later arrivals, at most w + (1 + lambda) c + beta seconds of its share's work are
admitted up to and including a request, where w is the older work waiting at its arrival, because work
admitted before it is either older or charged to B; and a request that is the oldest of its share is
overtaken for at most B seconds of the clock. The clock holds where the predictions do not: beside long
answers, a single slot for running requests serves one overtaker after the other.

The bound excludes the rest of its last step, the running answers that must end to make room,
recomputation after retractions, higher priorities, and work admitted while the request's KV is read
from storage, since SGLang passes over such requests.

Budgets count within one share (a tenant's share, ``fair_shares.py``) and one priority.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable
from operator import attrgetter, itemgetter
from typing import Any

from sglang_canopy.schedule.age_order import AgeOrder
from sglang_canopy.schedule.cost import Cost, Prefill, PrefillCost
from sglang_canopy.schedule.cost_queue import CostQueue, WaitingRequest, simulate_admission
from sglang_canopy.schedule.fair_shares import FairShares, Share

COST_FACTOR = 10.0
"""lambda: the budget grows by this multiple of the request's own cost."""
BASE_BUDGET_S = 2.0
"""beta, in seconds."""
SORTED_HEAD = 128
"""Positions at the head of the queue that are sorted; a pass rarely admits more."""


class BoundedShortest:
    """Queue in bounded shortest-first order.

    ``cost_factor=inf`` is pure shortest-first; 0, with ``base_budget_s`` 0, is FCFS.
    """

    def __init__(
        self,
        cost: Cost | None = None,
        cost_factor: float = COST_FACTOR,
        base_budget_s: float = BASE_BUDGET_S,
    ) -> None:
        self.cost: Cost = cost or PrefillCost()
        self.cost_factor = cost_factor
        self.base_budget_s = base_budget_s
        self.unbacked_tokens = math.inf
        """Tokens of the KV pool if KV that it evicts is lost; else infinity."""
        self.is_kv_at_risk = False
        self.shares = FairShares()
        self._numbers = itertools.count()
        self._queues: dict[tuple[int, Share], CostQueue] = {}
        """Priority and share -> queue. Empty queues are dropped, except the chunked prefill's."""
        self.chunked_prompt: WaitingRequest | None = None
        """The chunked prefill in progress."""
        self.admission_counts = {"shortest": 0, "budget": 0}
        """Admissions by reason. "budget": a cheaper request was passed over because it would have
        overdrawn a budget or did not fit."""

    def add(
        self, prefill: Prefill, tenant: Hashable = None, urgency: int = 0, request: Any = None
    ) -> WaitingRequest:
        """Add a new request. ``tenant``: to charge it to (``tenant.ChargedTenants``)."""
        number, share = next(self._numbers), self.shares.share_of(tenant)
        cost_s, net_cost_s = self._price(prefill)
        budget_s = self.cost_factor * cost_s + self.base_budget_s
        costs_s = cost_s, net_cost_s, budget_s, budget_s
        waiting = WaitingRequest(number, tenant, share, urgency, prefill, *costs_s, request)
        self._queue_of(waiting).add(waiting)
        return waiting

    def requeue(self, waiting: WaitingRequest, prefill: Prefill) -> None:
        """Requeue a retracted request at its old position, with the rest of its budget."""
        waiting.prefill = prefill
        waiting.cost_s, waiting.net_cost_s = self._price(prefill)
        self._queue_of(waiting).add(waiting)

    def update(self, waiting: WaitingRequest, prefill: Prefill) -> None:
        """Update the cost of ``waiting`` after a new prefix match."""
        self._queue_of(waiting).update(waiting, prefill, self._price)

    def set_time(self, now: float) -> None:
        """Pass the time, in seconds on any clock that all ranks share. Call before each pass."""
        for queue in self._queues.values():
            queue.set_time(now)

    def reprice(self) -> None:
        """Recompute all costs after a change of the cost model."""
        for queue in self._queues.values():
            queue.reprice(self._price)

    def _price(self, prefill: Prefill) -> tuple[float, float]:
        """Return cost and net cost, in seconds."""
        cost_s = self.cost.seconds(prefill)
        if not self.is_kv_at_risk:
            return cost_s, cost_s
        cold_prefill = Prefill(prefill.uncached + prefill.cached, reserved=prefill.reserved)
        return cost_s, 2 * cost_s - self.cost.seconds(cold_prefill)

    def _update_risk(self) -> None:
        """Order by net cost once ``unbacked_tokens`` wait, and until fewer than half of them do."""
        prefills = (w.prefill for queue in self._queues.values() for w in queue.requests.values())
        limit = self.unbacked_tokens / 2 if self.is_kv_at_risk else self.unbacked_tokens
        is_at_risk = limit < math.inf and sum(prefill.uncached for prefill in prefills) > limit
        if self.is_kv_at_risk != is_at_risk:
            self.is_kv_at_risk = is_at_risk
            self.reprice()

    def remove(self, waiting: WaitingRequest) -> None:
        """Remove an aborted request."""
        self._queue_of(waiting).remove(waiting)
        self._drop_if_empty(waiting)

    def admit(self, admitted: Iterable[WaitingRequest]) -> None:
        """Admit requests in this order, charging budgets and fair shares."""
        for waiting in admitted:
            queue = self._queue_of(waiting)
            is_shortest = queue.by_net_cost[0][2] is waiting
            self.admission_counts["shortest" if is_shortest else "budget"] += 1
            queue.admit(waiting)
            self._drop_if_empty(waiting)
            self.shares.charge(waiting.tenant, waiting.share, waiting.cost_s)

    def set_chunked_prompt(self, waiting: WaitingRequest | None) -> None:
        """Set the chunked prefill; ``None`` ends it."""
        previous, self.chunked_prompt = self.chunked_prompt, waiting
        if waiting is not previous:
            if previous is not None:
                self._queue_of(previous).set_chunked_prompt(None)
                self._drop_if_empty(previous)
            if waiting is not None:
                self._queue_of(waiting).set_chunked_prompt(waiting)

    def select(
        self, candidates: Iterable[WaitingRequest], fits: Callable[[WaitingRequest], bool]
    ) -> list[WaitingRequest]:
        """Select candidates, in order, that ``fits`` accepts and that overdraw no budget.

        Candidates that are not selected count as still waiting.
        """
        trials: dict[CostQueue, AgeOrder] = {}
        selected = []
        for waiting in candidates:
            trial = self._trial(trials, waiting)
            if trial.may_overtake(waiting.position) and fits(waiting):
                simulate_admission(trial, waiting)
                selected.append(waiting)
        return selected

    def over_budget(self, order: Iterable[WaitingRequest], tokens: int) -> list[WaitingRequest]:
        """Return requests that would overdraw a budget if admitted in this order.

        Budgets of requests outside ``order``, and of the chunked prefill, count. Only the head of
        ``order`` is checked, up to ``tokens`` uncached tokens.
        """
        if all(queue.allows_every_order() for queue in self._queues.values()):
            return []
        trials: dict[CostQueue, AgeOrder] = {}
        overdrawing = []
        for waiting in order:
            if tokens <= 0:
                break
            trial = self._trial(trials, waiting)
            if trial.may_overtake(waiting.position):
                simulate_admission(trial, waiting)
                tokens -= waiting.prefill.uncached
            else:
                overdrawing.append(waiting)
        return overdrawing

    def in_order(self, sorted_head: int = SORTED_HEAD) -> list[WaitingRequest]:
        """Return the queue in admission order.

        Only the first ``sorted_head`` requests are sorted; the rest of each priority is in order of
        arrival. Prices the queue anew when net costs begin or end to count; call ``admit`` to admit.
        """
        self._update_risk()
        ordered: list[WaitingRequest] = []
        starts: dict[Share, float] = {}
        by_urgency: defaultdict[int, dict[Share, CostQueue]] = defaultdict(dict)
        for (urgency, share), queue in self._queues.items():
            if queue.requests:
                by_urgency[urgency][share] = queue
        for _, by_share in sorted(by_urgency.items(), key=itemgetter(0), reverse=True):
            walks = {share: queue.walk() for share, queue in by_share.items()}
            next_by_share = {share: next(walk) for share, walk in walks.items()}
            starts = self.shares.starts(by_share) | starts
            while next_by_share and len(ordered) < sorted_head:
                share = min(next_by_share, key=starts.__getitem__)
                ordered.append(next_by_share[share])
                starts[share] += next_by_share[share].cost_s
                following = next(walks[share], None)
                if following is None:
                    del next_by_share[share]
                else:
                    next_by_share[share] = following
            requests = (w for queue in by_share.values() for w in queue.requests.values())
            head = {*ordered}
            ordered += sorted((w for w in requests if w not in head), key=attrgetter("number"))
        return ordered

    def _trial(self, trials: dict[CostQueue, AgeOrder], waiting: WaitingRequest) -> AgeOrder:
        """Return the budgets of the queue of ``waiting`` in ``trials``, at first a copy."""
        queue = self._queue_of(waiting)
        if queue not in trials:
            trials[queue] = queue.age_order.copy()
        return trials[queue]

    def _queue_of(self, waiting: WaitingRequest) -> CostQueue:
        key = waiting.urgency, waiting.share
        if key not in self._queues:
            self._queues[key] = CostQueue()
        return self._queues[key]

    def _drop_if_empty(self, waiting: WaitingRequest) -> None:
        queue = self._queue_of(waiting)
        if not queue.requests and queue.chunked_prompt is None:
            del self._queues[waiting.urgency, waiting.share]
