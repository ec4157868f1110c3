"""One scheduler's waiting queue: the cost of requests, their order, and the protection of prefixes.

All decisions are equal on all ranks: they depend on the order of arrival, the tree, and a cost
model with the first rank's figures. Timings differ by rank; only the first rank's are used.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from sglang.srt.managers.schedule_policy import CLIP_MAX_NEW_TOKENS
from sglang.srt.mem_cache.common import match_kv_cache
from sglang.srt.mem_cache.unified_cache.components import BASE_COMPONENT_TYPE

from sglang_canopy.config.queue import BOUNDED_SHORTEST, SGLANG, QueueFlags
from sglang_canopy.ranks import from_first, groups_of
from sglang_canopy.records import GATEWAY
from sglang_canopy.schedule.answer_cost import AnswerCost, ServerCost
from sglang_canopy.schedule.arranged import Arranged
from sglang_canopy.schedule.bounded_shortest import BoundedShortest
from sglang_canopy.schedule.prefill_cost import STEP_TOKENS, Prefill, PrefillCost
from sglang_canopy.server.scheduler.prefill_times import PrefillTimes
from sglang_canopy.server.scheduler.running_requests import running_requests
from sglang_canopy.tenant import ClaimedTenant, Vouched

if TYPE_CHECKING:
    from sglang_canopy.radix.cache import CanopyRadixCache

PLACES = 256
"""Running requests of a cache without a server."""
PROTECT_PASSES = 32
"""Passes between two renewals of the protection (as for SGLang's LRU)."""
PROTECTED = 128
"""Requests at the head of the queue whose prefixes are protected (also SGLang's number)."""


class LiveQueue:
    """The waiting queue of a scheduler with ``cache``. All calls are on the scheduler's thread."""

    def __init__(
        self,
        cache: CanopyRadixCache,
        options: QueueFlags,
        step_tokens: int = STEP_TOKENS,
        measures: bool = True,
        places: int = PLACES,
    ) -> None:
        """``step_tokens``: maximum tokens of a prefill step. ``places``: of running requests.
        ``measures``: whether the time of
        every batch is that of its prefills, and all ranks compute equal batches."""
        self.orders = options.queue_order == BOUNDED_SHORTEST
        self.measures = measures or self.orders
        self.cost = PrefillCost(step_tokens)
        self.answers = AnswerCost(places, cache.token_to_kv_pool_allocator.size)
        self.order = BoundedShortest(ServerCost(self.cost, self.answers), options.max_wait_factor)
        self._cache = cache
        self._core = cache.tree_core
        self.request_of = self._core.requests.of
        self._requests = _Requests(self)
        self._arranged = Arranged(self.order, self._requests)
        self._choosing = False
        self._excluded: list[Any] = []
        """Requests excluded from the step being chosen, which would overdraw a budget."""
        self._chunked: Any = None
        """The chunked prefill in progress, while a batch is chosen."""
        self._passes = 0
        self.times = PrefillTimes()

    def status(self) -> dict[str, Any]:
        """Return the state for operators. Safe on any thread.

        Fields of Canopy's order are ``None`` under SGLang's order, as are the fitted times if
        prefills are not measured.
        """
        base, token, pair, loaded = self.cost.coefficients
        return {
            "order": BOUNDED_SHORTEST if self.orders else SGLANG,
            "waiting_requests": len(self._arranged) if self.orders else None,
            "admitted": dict(self.order.admitted_by) if self.orders else None,
            "fitted_batches": self.cost.batches if self.measures else None,
            "seconds": {
                "batch": base,
                "token": token,
                "token_pair": pair,
                "loaded_token": loaded,
                "decode_step": self.answers.step_s,
            }
            if self.measures
            else None,
            "step_tokens": self.cost.step_tokens if self.measures else None,
            "answers_use": self.answers.used if self.orders else None,
        }

    # ---- the cost of a request ----

    def look_up(self, req: Any) -> None:
        """Match ``req`` against the cache, which also protects its prefix in the tree."""
        req.canopy_matched = self._matched(req)
        match_kv_cache(req, self._cache)

    def refresh(self, req: Any) -> None:
        """Match ``req`` again if its match can have changed."""
        windows = len(self._core.components) > 1  # their release changes no node
        if windows or getattr(req, "canopy_matched", None) != self._matched(req):
            self.look_up(req)

    def _matched(self, req: Any) -> tuple[int, int, int]:
        return self._core.changes, len(req.output_ids), req.retraction_count

    def queued(self, req: Any) -> None:
        """Register ``req`` before it joins the queue."""
        self.look_up(req)

    def computed(self, batch: Any) -> None:
        """Record the time that ``batch`` took, and periodically agree on the cost model.

        Collective every ``REFIT_BATCHES`` prefill batches.
        """
        measured = self.times.of(batch)
        if self.times.decoded_s is not None:
            self.answers.stepped(self.times.decoded_s)
        if measured is None:
            return
        self.cost.add(*measured)
        if self.times.refit_due:
            self._agree()

    def _agree(self) -> None:
        """Adopt the first rank's fit and decode step. Collective."""
        found = (self.cost.fitted() or (0.0, 0.0, 0.0, 0.0), self.answers.measured_s())
        fitted, step_s = from_first(groups_of(self._cache), found)
        self.cost.adopt(fitted)
        self.answers.adopt(step_s)
        self.order.reprice()

    # ---- the order of requests ----

    def time_s(self) -> float:
        """Return the time of the latest arrival, which is equal on all ranks."""
        return self._core.clock.now

    def arrange(self, queue: list[Any], urgency: Callable[[Any], int]) -> None:
        """Sort ``queue`` into the order of admission, in place."""
        self._requests.urgency = urgency
        queue[:] = self._arranged.arrange(queue, self._chunked)

    def choose(self, scheduler: Any, running: Any, choose: Callable[[], Any]) -> Any:
        """Choose a batch without requests that would overdraw an older one's budget.

        ``running``: the batch that decodes.
        """
        self._forget(scheduler, running)
        self._chunked = scheduler.chunked_req
        self._choosing = True
        try:
            chosen = choose()
        finally:
            self._choosing = False
            self._chunked = None
            excluded, self._excluded = self._excluded, []
            scheduler.waiting_queue.extend(excluded)
        batch, _ = chosen
        if batch is not None:
            self._arranged.admit(batch.reqs)
        return chosen

    def _forget(self, scheduler: Any, running: Any) -> None:
        """Drop requests that were aborted or have finished."""
        arranged, waiting = self._arranged, scheduler.waiting_queue
        if len(waiting) < len(arranged):
            arranged.drop_aborted(waiting)
        if scheduler.chunked_req is None:
            self.order.chunked(None, 0.0)
        here = {id(req) for req in running_requests(scheduler, running) if not req.finished()}
        gone = arranged.may_come_back - here
        if not all(arranged.admitted(key).finished() for key in gone):
            gone -= {id(req) for req in scheduler.waiting_queue}  # retracted
        if gone:
            for req in (arranged.admitted(key) for key in arranged.may_come_back if key in gone):
                self.answers.finished(_reserved(req, 0), len(req.output_ids))
            arranged.finished(gone)

    def chunk_limit(
        self, chunked: Any, queue: list[Any], step_tokens: int, page: int
    ) -> int | None:
        """Return the tokens that ``chunked`` may take of the next step, or ``None`` for no limit.

        Moves the requests that share the step to the head of ``queue``; without any there is no
        limit.
        """
        left, held = self._free_tokens(chunked), set[Any]()

        def fits(req: Any) -> bool:
            nonlocal left
            unlocked = self._unlocked_nodes(req, held)
            needed = _to_compute(req) + _to_generate(req) + page
            needed += sum(len(node.key) for node in unlocked)
            if needed > left:
                return False
            left -= needed
            held.update(unlocked)
            return True

        tokens = len(chunked.full_untruncated_fill_ids) - chunked.prefix_len
        sharing, later = self._arranged.sharing(tokens, step_tokens, page, fits)
        if not sharing:
            return None
        self._exclude(queue, later)
        taken = sum(-(-_to_compute(req) // page) * page for req in sharing)
        return max(page, (step_tokens - taken) // page * page)

    def _free_tokens(self, chunked: Any) -> int:
        """Return the free tokens of memory beyond the remaining need of ``chunked``."""
        free = self._cache.token_to_kv_pool_allocator.available_size()
        free += self._cache.evictable_size()
        rest = len(chunked.full_untruncated_fill_ids) - chunked.prefix_len
        return int(free - rest - _to_generate(chunked))

    def _unlocked_nodes(self, req: Any, held: set[Any]) -> list[Any]:
        """Return the nodes of ``req``'s match that are neither locked nor in ``held``.

        They can be evicted until the request is admitted, or are only on the host.
        """
        node, nodes = self._core.node_by_id(req.best_match_node), []
        while node is not self._core.root_node and node not in held:
            if node.component_data[BASE_COMPONENT_TYPE].lock_ref:
                break
            nodes.append(node)
            node = node.parent
        return nodes

    def exclude_over_budget(self, queue: list[Any]) -> None:
        """Remove from the sorted ``queue`` the requests that would overdraw a budget."""
        if self._choosing and (later := self._arranged.over_budget()):
            self._exclude(queue, later)

    def _exclude(self, queue: list[Any], later: list[Any]) -> None:
        """Set ``queue`` to the current order without ``later``."""
        self._excluded = later
        gone = {id(req) for req in later}
        queue[:] = [req for req in self._arranged.arranged() if id(req) not in gone]

    # ---- protection ----

    def protect(self, queue: list[Any]) -> None:
        """Renew, at intervals, the protection of the prefixes of ``queue``'s first requests."""
        if not queue:
            return
        self._passes += 1
        if self._passes % PROTECT_PASSES != 1:
            return
        paths = []
        for req in queue[:PROTECTED]:
            self.look_up(req)
            paths.append((self._core.node_by_id(req.best_match_node), self.request_of(req)))
        self._core.protected.of_queue(paths)


class _Requests:
    """SGLang's ``Req`` as the queue sees it. Reads the match that ``look_up`` stored on it."""

    def __init__(self, queue: LiveQueue) -> None:
        self._queue = queue
        self.urgency: Callable[[Any], int] = lambda _req: 0

    def tenant(self, req: Any) -> ClaimedTenant:
        request = self._queue.request_of(req)
        return Vouched(request.tenant) if request.source == GATEWAY else request.tenant

    def prefill(self, req: Any, look_up: bool) -> Prefill:
        if look_up:
            self._queue.refresh(req)
        tokens = len(req.origin_input_ids) + len(req.output_ids)
        cached = min(req.num_matched_prefix_tokens, tokens - 1)
        loaded = max(cached - req.prefix_len, 0)
        return Prefill(tokens - cached, cached, loaded, _to_generate(req))

    def rest(self, req: Any) -> Prefill:
        tokens = len(req.full_untruncated_fill_ids)
        return Prefill(tokens - req.prefix_len, req.prefix_len, reserved=_to_generate(req))

    def step_tokens(self) -> int:
        return self._queue.cost.step_tokens

    def time_s(self) -> float:
        return self._queue.time_s()


def _to_compute(req: Any) -> int:
    tokens = len(req.origin_input_ids) + len(req.output_ids)
    return max(1, tokens - req.num_matched_prefix_tokens)


def _to_generate(req: Any) -> int:
    """Return the tokens that SGLang reserves for the rest of the answer."""
    return _reserved(req, len(req.output_ids))


def _reserved(req: Any, generated: int) -> int:
    return min(max(req.sampling_params.max_new_tokens - generated, 0), CLIP_MAX_NEW_TOKENS)
