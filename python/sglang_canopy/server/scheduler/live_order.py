"""The order of one scheduler's requests: their cost, who may overtake, and the protection of prefixes.

All decisions are equal on all ranks: they depend on the order of arrival, the tree, and a cost
model with the first rank's figures. Timings differ by rank; only the first rank's are used.
"""

from __future__ import annotations

import time
from collections.abc import Hashable
from typing import TYPE_CHECKING, Any

from sglang.srt.managers.schedule_policy import CLIP_MAX_NEW_TOKENS
from sglang.srt.mem_cache.common import match_kv_cache
from sglang.srt.mem_cache.unified_cache.components import BASE_COMPONENT_TYPE

from sglang_canopy.config.queue import BOUNDED_SHORTEST, SGLANG, QueueFlags
from sglang_canopy.ranks import broadcast_from_first, reduction_groups
from sglang_canopy.records import GATEWAY
from sglang_canopy.schedule.arranged import ArrangedQueue
from sglang_canopy.schedule.bounded_shortest import BoundedShortest
from sglang_canopy.schedule.cost import (
    DEFAULT_STEP_TOKENS,
    REFIT_BATCHES,
    AnswerCost,
    Prefill,
    PrefillCost,
    ServerCost,
)
from sglang_canopy.tenant import ChargedTenants
from sglang_canopy.wire.request_state import state_of

if TYPE_CHECKING:
    from sglang_canopy.radix.cache import CanopyRadixCache

PROTECTION_PASSES = 32
"""Passes between two renewals of the protection (as for SGLang's LRU)."""
PROTECTED_REQUESTS = 128
"""Requests at the head of the queue whose prefixes are protected (also SGLang's number)."""


class LiveOrder:
    """The order of the requests of a scheduler with ``cache``, as ``ArrangedQueue`` reads them. All methods
    but ``status`` are called on the scheduler's thread."""

    def __init__(
        self, cache: CanopyRadixCache, options: QueueFlags, step_tokens: int = DEFAULT_STEP_TOKENS
    ) -> None:
        """``step_tokens``: maximum tokens of a prefill step."""
        self.is_on = options.queue_order == BOUNDED_SHORTEST
        self.prefill_cost = PrefillCost(step_tokens)
        self.answer_cost = AnswerCost(
            cache.req_to_token_pool.size, cache.token_to_kv_pool_allocator.size
        )
        self.bounded_queue = BoundedShortest(ServerCost(self.prefill_cost, self.answer_cost))
        if not cache.tree_core.live.host_tokens:
            self.bounded_queue.unbacked_tokens = self.answer_cost.pool_tokens
        self._charged_tenants = ChargedTenants()
        self.priority_sign = 0
        """SGLang's: 1 if lower priorities are more urgent, else -1; 0 without priorities."""
        self._cache = cache
        self._core = cache.tree_core
        self.arranged = ArrangedQueue(self.bounded_queue, self)
        self._pass_count = 0
        self.batch_ended_at = 0.0
        """End of the latest batch, on the monotonic clock."""
        self.prefill_batches = 0
        """Prefill batches so far; equal on all ranks."""

    def status(self) -> dict[str, Any]:
        """Return the state for operators. Safe on any thread. Counts are ``None`` under SGLang's order."""
        return {
            "order": BOUNDED_SHORTEST if self.is_on else SGLANG,
            "waiting_requests": len(self.arranged) if self.is_on else None,
            "admitted": dict(self.bounded_queue.admission_counts) if self.is_on else None,
        }

    # ---- the cost of a request ----

    def look_up(self, req: Any) -> None:
        """Match ``req`` against the cache, which also protects its prefix, unless its latest match is
        of the same tree. SGLang's own matches count."""
        # The KV of a sliding window is released without a new version: a stored match may be stale.
        has_window_components = len(self._core.components) > 1
        if has_window_components or req.canopy.matched_version != self._core.match_version(req):
            match_kv_cache(req, self._cache)

    def record_batch(self, batch: Any) -> None:
        """Record the time of ``batch`` since the previous one, and periodically agree on the cost
        model. Call it for every batch. Collective every ``REFIT_BATCHES`` prefill batches."""
        # A batch may be launched while the previous one still runs.
        now, batch_began_at = time.monotonic(), max(self.batch_ended_at, batch.launch_ts or 0.0)
        self.batch_ended_at = now
        if batch.forward_mode.is_decode():
            self.answer_cost.record_step(now - batch_began_at)
        if not batch.forward_mode.is_extend() or not batch.extend_lens:
            return
        lengths = zip(batch.reqs, batch.extend_lens, batch.prefix_lens, strict=False)
        prefills = (
            Prefill(new, cached, _loaded_tokens(req, cached)) for req, new, cached in lengths
        )
        self.prefill_cost.record_batch(prefills, now - batch_began_at)
        self.prefill_batches += 1
        if self.prefill_batches % REFIT_BATCHES == 0:
            self._agree()

    def _agree(self) -> None:
        """Adopt the first rank's fit and decode step. Collective."""
        fit_and_step_s = self.prefill_cost.fit(), self.answer_cost.median_step_s()
        coefficients, step_s = broadcast_from_first(reduction_groups(self._cache), fit_and_step_s)
        self.prefill_cost.adopt(coefficients)
        self.answer_cost.adopt(step_s)
        self.bounded_queue.reprice()

    # ---- the order of requests ----

    def share_step(
        self, chunked: Any, step_tokens: int, page_tokens: int
    ) -> tuple[list[Any], int] | None:
        """Let requests share the next step with ``chunked``, within the memory that it leaves; see
        ``ArrangedQueue.share_step``."""
        remaining_tokens = len(chunked.full_untruncated_fill_ids) - chunked.prefix_len
        free_tokens = self._cache.token_to_kv_pool_allocator.available_size()
        free_tokens += self._cache.evictable_size() - remaining_tokens
        free_tokens -= _reserved_tokens(chunked, len(chunked.output_ids))
        return self.arranged.share_step(remaining_tokens, step_tokens, page_tokens, free_tokens)

    def forget(self, req: Any) -> None:
        """Forget ``req``, which was answered or left."""
        if self.arranged.forget(req):
            self.answer_cost.record_answer(_reserved_tokens(req, 0), len(req.output_ids))

    # ---- protection ----

    def protect(self, queue: list[Any]) -> None:
        """Renew, at intervals, the protection of the prefixes of ``queue``'s first requests."""
        if not queue:
            return
        self._pass_count += 1
        if self._pass_count % PROTECTION_PASSES != 1:
            return
        core, paths = self._core, []
        for req in queue[:PROTECTED_REQUESTS]:
            self.look_up(req)
            paths.append((core.node_by_id(req.best_match_node), core.requests.register(req)))
        core.protected.protect_queue(paths)

    # ---- requests as ``ArrangedQueue`` reads them, from the match that ``look_up`` stored ----

    def tenant(self, req: Any) -> Hashable:
        request, now = self._core.requests.register(req), self._core.clock.now
        return self._charged_tenants.choose(request.tenant, request.source == GATEWAY, now)

    def urgency(self, req: Any) -> int:
        return -self.priority_sign * (req.priority or 0)

    def match(self, req: Any) -> None:
        if state_of(req).matched_version is None:
            self.look_up(req)

    def prefill(self, req: Any, look_up: bool) -> Prefill:
        if look_up:
            self.look_up(req)
        tokens = len(req.origin_input_ids) + len(req.output_ids)
        cached = min(req.num_matched_prefix_tokens, tokens - 1)
        loaded = max(cached - req.prefix_len, 0)
        if not look_up:  # SGLang has loaded and counted them, if it admits the request
            loaded = max(loaded, min(req.host_loaded_length, cached))
        return Prefill(tokens - cached, cached, loaded, _reserved_tokens(req, len(req.output_ids)))

    def unlocked_tokens(self, req: Any) -> int:
        node, tokens = self._core.node_by_id(req.best_match_node), 0
        while node is not self._core.root_node:
            if node.component_data[BASE_COMPONENT_TYPE].lock_ref:
                break
            tokens += len(node.key)
            node = node.parent
        return tokens

    def step_tokens(self) -> int:
        return self.prefill_cost.step_tokens

    def time_s(self) -> float:
        """Return the time of the latest arrival, which is equal on all ranks."""
        return self._core.clock.now


def _reserved_tokens(req: Any, generated_tokens: int) -> int:
    """Return the tokens that SGLang reserves for the rest of an answer of ``generated_tokens``."""
    return min(max(req.sampling_params.max_new_tokens - generated_tokens, 0), CLIP_MAX_NEW_TOKENS)


def _loaded_tokens(req: Any, cached_tokens: int) -> int:
    """Return the tokens of ``req`` that were loaded from the host for this batch."""
    # Later chunks of a prompt begin beyond the matched prefix.
    is_first_chunk = cached_tokens <= req.num_matched_prefix_tokens
    return min(req.host_loaded_length, cached_tokens) if is_first_chunk else 0
