"""The adapters of SGLang's cache: a shorter eviction path for a single tier, and victims from the policy.

SGLang evicts victim by victim in resumable steps, and builds a heap over every evictable leaf for each
eviction. The policy returns one victim at a time, in O(W) for W categories.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.srt.mem_cache.unified_cache.components.full import FullComponent
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

from sglang_canopy.radix import storage_holds
from sglang_canopy.radix.counters import TTL
from sglang_canopy.releases import drop_none

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.mem_cache.base_prefix_cache import InsertParams
    from sglang.srt.mem_cache.unified_cache.unified_tree_core import UnifiedTreeNode

    from sglang_canopy.radix.core import CanopyTreeCore

logger = logging.getLogger(__name__)

_FULL = ComponentType.FULL


class CanopyRadixCache(UnifiedRadixCache):
    """``UnifiedRadixCache`` over a ``CanopyTreeCore``. Without a lower tier a call deletes its
    victims in one pass and frees their slots together. With a lower tier SGLang's steps run, which
    leave time for a host copy between two victims. With sliding windows or states they run too:
    SGLang evicts windows and states in its own order."""

    tree_core: CanopyTreeCore

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.tree_core.disk.attach(self)
        self.drain_s = self.tree_core.live.tiers.drain_s
        """Seconds for the drain at shutdown."""
        self.storage_holds = storage_holds.StorageHolds(self)

    def init_hicache(self, server_args: Any, params: Any) -> None:
        super().init_hicache(server_args, params)
        if self.host_memory_mode != "buffer_only":
            self.tree_core.live.host_tokens = int(self.cache_controller.mem_pool_host.size)

    def release_host_resources(self) -> None:
        """Drain to the disk tier first: SGLang calls this after a scheduler's last request."""
        try:
            self.tree_core.disk.drain(self.drain_s)
        except Exception:
            logger.exception("Canopy disk tier: not closed")
        super().release_host_resources()

    def is_backuped(self, node_id: int) -> bool:
        """Return whether the storage may have the pages behind a node; SGLang reads it only if so. Under
        ``write_back`` it may have pages behind a node without a host copy."""
        if super().is_backuped(node_id):
            return True
        return self.storage_holds.may_hold and self.get_last_hash_value(node_id) is not None

    def _evict_components(
        self,
        request_by_type: dict[ComponentType, int],
        tracker: dict[ComponentType, int],
        available_size_targets: dict[ComponentType, tuple[ComponentType, int]] | None = None,
        *,
        allocation_reclaim_satisfied: Any = None,
    ) -> None:
        targets = available_size_targets or {}
        if (
            len(self.tree_components) > 1
            or self.cache_controller is not None
            or self.linker is not None
            or allocation_reclaim_satisfied is not None
        ):
            self._evict_in_steps(
                request_by_type, tracker, available_size_targets, allocation_reclaim_satisfied
            )
            return
        needed_tokens = request_by_type[_FULL]
        if _FULL in targets:
            needed_tokens = min(needed_tokens, self._shortfall_tokens(targets))
        while needed_tokens > 0:
            freed_slots: dict[ComponentType, list] = {_FULL: []}
            try:
                freed_tokens = self.tree_core.delete_leaves(needed_tokens, freed_slots)
            finally:  # free the slots of removed leaves, even if the next leaf failed
                self._free_values(freed_slots, {})
            tracker[_FULL] += freed_tokens
            if freed_tokens == 0 or _FULL not in targets:
                return
            # An allocator may hold back freed slots, so continue until its target is met.
            needed_tokens = self._shortfall_tokens(targets)

    def _evict_in_steps(
        self,
        request_by_type: dict[ComponentType, int],
        tracker: dict[ComponentType, int],
        available_size_targets: dict[ComponentType, tuple[ComponentType, int]] | None,
        allocation_reclaim_satisfied: Any,
    ) -> None:
        """Evict by SGLang's own steps, again after each end of the storage's reads and writes."""
        targets = available_size_targets or {}
        # For an allocation, evict_for_alloc (unified_radix_cache.py) requests the eviction of
        # everything and stops at its target.
        is_allocation = _FULL in targets and targets[_FULL][0] is _FULL
        if is_allocation:
            self.tree_core.count_shortfall = lambda: self._shortfall_tokens(targets)
        optional_arguments = drop_none(allocation_reclaim_satisfied=allocation_reclaim_satisfied)
        may_retry = self.storage_holds.may_hold and not optional_arguments
        self.storage_holds.begin_eviction()
        try:
            while True:
                super()._evict_components(
                    request_by_type, tracker, available_size_targets, **optional_arguments
                )
                missing_tokens = request_by_type[_FULL] - tracker[_FULL]
                if is_allocation:
                    missing_tokens = self._shortfall_tokens(targets)
                if not may_retry or missing_tokens <= 0 or not self.storage_holds.end_holds():
                    return
        finally:
            self.tree_core.count_shortfall = None

    def _shortfall_tokens(self, targets: dict[ComponentType, tuple[ComponentType, int]]) -> int:
        """Return the tokens that an allocation still lacks."""
        component, target = targets[_FULL]
        return target - self._component_available_size(component)


class CanopyFullComponent(FullComponent):
    """Full attention KV evicted in the order of a Canopy policy."""

    tree_core: CanopyTreeCore

    # ---- write a request's attributes to its nodes ----

    def prepare_for_caching_req(
        self, req: Req, insert_params: InsertParams, token_ids_len: int, is_finished: bool
    ) -> int | None:
        requests = self.tree_core.requests
        insert_params.canopy = requests.admit(req)  # type: ignore[attr-defined]
        if is_finished:
            requests.report_end(req)
        return super().prepare_for_caching_req(req, insert_params, token_ids_len, is_finished)

    def commit_insert_component_data(
        self, node: UnifiedTreeNode, is_new_leaf: bool, params: Any, result: Any, cache_actions: Any
    ) -> None:
        if params.inserted_len and self.tree_core.inserting_request is None:
            return  # SGLang inserts a finished prompt again, to split its leaf (checkpoint_into_tree)
        self.tree_core.requests.mark_path_used(node, self.tree_core.inserting_request)

    def finalize_match_result_in_tree_core(
        self, result: Any, params: Any, value_chunks: Any, best_value_len: int
    ) -> Any:
        request_state = getattr(params.req, "canopy", None)
        if request_state is not None and request_state.request is not None:
            self.tree_core.protected.protect_match(result.best_match_node, request_state.request)
            request_state.matched_version = self.tree_core.match_version(params.req)
        return super().finalize_match_result_in_tree_core(
            result, params, value_chunks, best_value_len
        )

    # ---- device tier ----

    def _evict_device_start(self, request_cnt: int) -> None:
        self._evict_device_request_cnt = request_cnt
        self._last_victim = None

    def _evict_device_next_node(
        self, tracker: Any, device_frees: Any, host_frees: Any, cache_actions: Any = None
    ) -> int | None:
        core = self.tree_core
        leaves = core.evictable_device_leaves
        last_victim = self._last_victim
        if last_victim is not None and last_victim in leaves:
            # _evict_components (unified_radix_cache.py) could not write it back: no second offer.
            leaves.exclude(last_victim)
        self._last_victim = None
        core.disk.finish_copies()
        needed_tokens = self._evict_device_request_cnt - tracker[self.component_type]
        if needed_tokens <= 0:
            return None
        if core.count_shortfall is not None:
            needed_tokens = min(needed_tokens, max(core.count_shortfall(), 1))
        victim = leaves.next_victim(core.clock.now)
        if victim is None:
            return None
        node = core.split_for_eviction(*victim, needed_tokens, cache_actions)
        self._last_victim = node
        return node.id

    def _evict_device_end(self) -> None:
        self.tree_core.evictable_device_leaves.restore_excluded()
        self._last_victim = None

    # ---- host tier ----

    def drive_host_eviction(
        self,
        num_tokens: int,
        tracker: Any,
        device_frees: Any,
        host_frees: Any,
        cache_actions: Any = None,
    ) -> None:
        core, optional_arguments = self.tree_core, drop_none(cache_actions=cache_actions)
        component = self.component_type
        while tracker[component] < num_tokens:
            victim = core.evictable_host_leaves.next_victim(core.clock.now)
            if victim is None:
                return
            has_expired = core.evictable_host_leaves.has_victim_expired
            node = core.split_for_eviction(*victim, num_tokens - tracker[component], cache_actions)
            if has_expired:
                node.canopy.eviction_reason = TTL
            core._evict_host_leaf(node, tracker, device_frees, host_frees, **optional_arguments)
