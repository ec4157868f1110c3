"""SGLang's component of recurrent states, evicting the least valuable state.

SGLang evicts the least recently used state. Every turn of a conversation leaves a state, and only
the last one is likely to be used again. Here the order is that of ``policy/states.py``; the
eviction itself is SGLang's: a leaf is evicted whole, another node only loses its state. With a host
tier, this order applies to the device; the host's is SGLang's.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from sglang.srt.mem_cache.unified_cache.components import BASE_COMPONENT_TYPE, EvictLayer
from sglang.srt.mem_cache.unified_cache.components.base import (
    CacheTransferPhase,
    InternalStateBackup,
    LRURefreshPhase,
)
from sglang.srt.mem_cache.unified_cache.components.mamba import MambaComponent

from sglang_canopy.policy.states import State, StatePolicy
from sglang_canopy.radix.live_request import set_offsets

if TYPE_CHECKING:
    from sglang.srt.mem_cache.unified_cache.unified_tree_core import UnifiedTreeNode

    from sglang_canopy.radix.core import CanopyTreeCore


class CanopyMambaComponent(MambaComponent):
    """States evicted in the order of ``params.canopy.states``."""

    tree_core: CanopyTreeCore

    def __init__(self, cache: Any, params: Any) -> None:
        super().__init__(cache, params)
        order: StatePolicy | None = params.canopy.states
        assert order is not None, "no order of states"
        self.order = order
        self._passed_over: list[State] = []
        """States that this walk could not evict: locked, or kept by SGLang."""
        self._last_state: State | None = None
        """The last state that this walk offered."""
        self._copying: State | None = None
        """The last state that this walk had copied to the host."""

    # ---- cached states ----

    def commit_insert_component_data(
        self, node: UnifiedTreeNode, is_new_leaf: bool, params: Any, result: Any, cache_actions: Any
    ) -> None:
        super().commit_insert_component_data(node, is_new_leaf, params, result, cache_actions)
        if node is self.tree_core.root_node:
            return
        if node.canopy.state is None:
            set_offsets(node)
            leaf = node.canopy
            self._enter(node, State(leaf.offset + leaf.length, self.tree_core.clock.now, node.id))
        else:
            self._used(node)

    def refresh_lru(
        self, phase: LRURefreshPhase, node: UnifiedTreeNode, root_node: UnifiedTreeNode
    ) -> None:
        super().refresh_lru(phase, node, root_node)
        if phase is LRURefreshPhase.MATCH_END and node is not root_node:
            self._used(node)

    def evict_component(
        self, node: UnifiedTreeNode, *args: Any, target: EvictLayer = EvictLayer.DEVICE, **more: Any
    ) -> tuple[int, int]:
        if EvictLayer.DEVICE in target and node is not self.tree_core.root_node:
            self._gone(node)
        return super().evict_component(node, *args, target=target, **more)

    def commit_hicache_transfer(
        self, node: UnifiedTreeNode, phase: CacheTransferPhase, *args: Any, **kwargs: Any
    ) -> None:
        super().commit_hicache_transfer(node, phase, *args, **kwargs)
        leaf = node.canopy
        came = node.component_data[self.component_type].value is not None and leaf.state is None
        if phase is CacheTransferPhase.LOAD_BACK and came:
            set_offsets(node)
            now = self.tree_core.clock.now
            self._enter(node, State(leaf.offset + leaf.length, now, node.id))

    def _enter(self, node: UnifiedTreeNode, state: State) -> None:
        """Register ``state``, which is now on the device at the end of ``node``."""
        node.canopy.state, state.node = state, node
        self._value(node)
        self.order.admit(state, self.tree_core.clock.now)
        for below in self._next_states(node):
            self._revalue(below)

    def _used(self, node: UnifiedTreeNode) -> None:
        state, now = node.canopy.state, self.tree_core.clock.now
        if state is not None and state.last_access < now:
            self.order.drop(state)
            state.last_access = now
            self.order.admit(state, now)

    def _gone(self, node: UnifiedTreeNode) -> None:
        state, node.canopy.state = node.canopy.state, None
        if state is None:
            return
        self.order.drop(state)
        for below in self._next_states(node):
            self._revalue(below)

    # ---- value of a state: tokens since the state above ----

    def _value(self, node: UnifiedTreeNode) -> None:
        above = node.parent
        while above is not self.tree_core.root_node and above.canopy.state is None:
            above = above.parent
        saved_above = 0 if above.canopy.state is None else above.canopy.state.offset
        node.canopy.state.saves = float(node.canopy.state.offset - saved_above)

    def _revalue(self, node: UnifiedTreeNode) -> None:
        state = node.canopy.state
        admitted = state.slot is not None
        self.order.drop(state)
        self._value(node)
        if admitted:
            self.order.admit(state, self.tree_core.clock.now)

    def _next_states(self, node: UnifiedTreeNode) -> Iterator[UnifiedTreeNode]:
        """Yield the nearest nodes below ``node`` that have a state."""
        stack = list(node.children.values())
        while stack:
            child = stack.pop()
            if child.canopy.state is not None:
                yield child
            else:
                stack.extend(child.children.values())

    # ---- eviction ----

    def _evict_device_start(self, request_cnt: int) -> None:
        self._evict_device_request_cnt = request_cnt
        self._last_state = self._copying = None

    def _evict_device_next_node(
        self, tracker: Any, device_frees: Any, host_frees: Any, cache_actions: Any
    ) -> Any:
        kind, core = self.component_type, self.tree_core
        if tracker[kind] >= self._evict_device_request_cnt:
            return None
        node = self._next_victim()
        if node is None:
            return None
        if node in core.evictable_device_leaves:
            self._last_state = node.canopy.state
            return node.id
        data = node.component_data
        if (
            core.enable_hicache
            and core.is_write_back
            and not node.backuped
            and data[kind].host_value is None
            and data[BASE_COMPONENT_TYPE].value is not None
        ):
            # The state stays until its copy was attempted; then SGLang evicts it.
            self._last_state = self._copying = node.canopy.state
            return InternalStateBackup(node_id=node.id, num_tokens=1)
        core._evict_component_and_detach_lru(
            node,
            self,
            device_frees,
            host_frees,
            cache_actions,
            target=EvictLayer.DEVICE,
            tracker=tracker,
        )
        core._cascade_evict(
            node, self, tracker, device_frees, host_frees, cache_actions=cache_actions
        )
        return None

    def _next_victim(self) -> UnifiedTreeNode | None:
        last, self._last_state = self._last_state, None
        if last is not None and last.slot is not None and not self._copied(last):
            self._pass_over(last)  # SGLang kept it
        while (state := self.order.victim(self.tree_core.clock.now)) is not None:
            if state.node.component_data[self.component_type].lock_ref == 0:
                return state.node
            self._pass_over(state)
        return None

    def _copied(self, state: State) -> bool:
        """Return whether SGLang kept ``state`` because its node became a leaf meanwhile."""
        copied, self._copying = self._copying, None
        return copied is state and state.node in self.tree_core.evictable_device_leaves

    def _pass_over(self, state: State) -> None:
        self.order.drop(state)
        self._passed_over.append(state)

    def _evict_device_end(self) -> None:
        passed_over, self._passed_over = self._passed_over, []
        for state in passed_over:
            if state.slot is None and state.node.canopy.state is state:
                self.order.admit(state, self.tree_core.clock.now)
