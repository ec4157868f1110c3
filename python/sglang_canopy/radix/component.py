"""SGLang's Full component, with victims chosen by the tier's policy.

SGLang builds a heap over every evictable leaf for each eviction. The policy returns one victim at a
time instead, in O(W) for W categories.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sglang.srt.mem_cache.unified_cache.components.full import FullComponent

from sglang_canopy.radix.counters import TTL

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.mem_cache.base_prefix_cache import InsertParams
    from sglang.srt.mem_cache.unified_cache.unified_tree_core import UnifiedTreeNode

    from sglang_canopy.radix.core import CanopyTreeCore


class CanopyFullComponent(FullComponent):
    """Full attention KV evicted in the order of a Canopy policy."""

    tree_core: CanopyTreeCore

    # ---- write a request's attributes to its nodes ----

    def prepare_for_caching_req(
        self, req: Req, insert_params: InsertParams, token_ids_len: int, is_finished: bool
    ) -> int | None:
        if is_finished:
            self.tree_core.requests.ended(req)
        return super().prepare_for_caching_req(req, insert_params, token_ids_len, is_finished)

    def commit_insert_component_data(
        self, node: UnifiedTreeNode, is_new_leaf: bool, params: Any, result: Any, cache_actions: Any
    ) -> None:
        self.tree_core.requests.used(node, self.tree_core.inserting)

    def finalize_match_result_in_tree_core(
        self, result: Any, params: Any, value_chunks: Any, best_value_len: int
    ) -> Any:
        request = getattr(params.req, "canopy", None)
        if request is not None:
            self.tree_core.protected.looked_up(result.best_match_node, request)
        return super().finalize_match_result_in_tree_core(
            result, params, value_chunks, best_value_len
        )

    # ---- device tier ----

    def _evict_device_start(self, request_cnt: int) -> None:
        self._evict_device_request_cnt = request_cnt
        self._last_victim = None

    def _evict_device_next_node(
        self, tracker: Any, device_frees: Any, host_frees: Any, cache_actions: Any
    ) -> int | None:
        core = self.tree_core
        leaves = core.evictable_device_leaves
        last = self._last_victim
        if last is not None and last in leaves:
            # SGLang could not write it back: do not offer it again in this walk.
            leaves.set_aside(last)
        self._last_victim = None
        need = self._evict_device_request_cnt - tracker[self.component_type]
        if need <= 0:
            return None
        if core.shortfall is not None:
            need = min(need, max(core.shortfall(), 1))
        choice = leaves.next_victim(core.clock.now)
        if choice is None:
            return None
        node = core.cut(*choice, need, cache_actions)
        self._last_victim = node
        return node.id

    def _evict_device_end(self) -> None:
        self.tree_core.evictable_device_leaves.restore_set_aside()
        self._last_victim = None

    # ---- host tier ----

    def drive_host_eviction(
        self, num_tokens: int, tracker: Any, device_frees: Any, host_frees: Any, cache_actions: Any
    ) -> None:
        core = self.tree_core
        ct = self.component_type
        while tracker[ct] < num_tokens:
            choice = core.evictable_host_leaves.next_victim(core.clock.now)
            if choice is None:
                return
            expired = core.evictable_host_leaves.victim_expired
            node = core.cut(*choice, num_tokens - tracker[ct], cache_actions)
            if expired:
                node.canopy.eviction_reason = TTL
            core._evict_host_leaf(
                node, tracker, device_frees, host_frees, cache_actions=cache_actions
            )
