"""SGLang's tree core with a ``NodeLeaf`` on every node and a policy behind each tier's leaves."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sglang.srt.mem_cache.unified_cache.components import BASE_COMPONENT_TYPE
from sglang.srt.mem_cache.unified_cache.unified_tree_core import UnifiedTreeCore

from sglang_canopy.policy.awaited import Awaited
from sglang_canopy.policy.keep import Keeps
from sglang_canopy.radix.clock import RequestClock
from sglang_canopy.radix.evictable import EvictableLeaves
from sglang_canopy.radix.leaf import NodeLeaf, set_offsets
from sglang_canopy.radix.match_end import can_end_after
from sglang_canopy.radix.offset_walk import OffsetWalkCore

if TYPE_CHECKING:
    from sglang.srt.mem_cache.cache_init_params import CacheInitParams
    from sglang.srt.mem_cache.unified_cache.components import ComponentType, TreeComponent
    from sglang.srt.mem_cache.unified_cache.unified_tree_core import UnifiedTreeNode

    from sglang_canopy.radix.live import LiveCache


class NodeMetadataCore(OffsetWalkCore):
    """Creates, splits and removes ``node.canopy`` with its node, and reports evictable leaves."""

    def __init__(
        self, params: CacheInitParams, components: dict[ComponentType, TreeComponent]
    ) -> None:
        self.live: LiveCache = params.canopy
        self.clock = RequestClock()
        device_tokens = params.token_to_kv_pool_allocator.size
        settings = self.live.settings
        self.keeps = Keeps(device_tokens, settings.keep_tenant_share, settings.keep_total_share)
        self.waiting = Awaited(device_tokens)
        self.live.device_tokens = device_tokens
        self.live.free_tokens = params.token_to_kv_pool_allocator.available_size
        super().__init__(params, components)

    def reset(self) -> None:
        for name in ("evictable_device_leaves", "evictable_host_leaves"):
            leaves = getattr(self, name, None)
            if leaves is not None:
                leaves.empty()
        super().reset()
        self.keeps.clear()
        self.waiting.clear()
        usable = self._usable if len(self.components) > 1 else None
        self.evictable_device_leaves = EvictableLeaves(
            self.live.device_policy, self.clock, usable=usable
        )
        self.evictable_host_leaves = EvictableLeaves(
            self.live.host_policy, self.clock, self.live.tiers.host_ttl, usable
        )

    # ---- SGLang's tree as it changes ----

    def _new_node(self, priority: int = 0) -> UnifiedTreeNode:
        node = UnifiedTreeCore._new_node(self, priority)
        node.canopy = leaf = NodeLeaf(node)
        leaf.device_since = leaf.host_since = self.clock.now
        return node

    def _add_new_node(
        self, parent: UnifiedTreeNode, key: Any, *args: Any, **kwargs: Any
    ) -> UnifiedTreeNode:
        node = super()._add_new_node(parent, key, *args, **kwargs)
        above = parent.canopy
        node.canopy.offset = above.offset + above.length
        node.canopy.length = len(key)
        return node

    def _split_node(self, key: Any, child: UnifiedTreeNode, split_len: int) -> Any:
        head, action = super()._split_node(key, child, split_len)
        tail_leaf, head_leaf = child.canopy, head.canopy
        head_leaf.inherit(tail_leaf)
        head_leaf.request_number = tail_leaf.request_number
        head_leaf.device_since = tail_leaf.device_since
        head_leaf.host_since = tail_leaf.host_since
        head_leaf.policy = tail_leaf.policy
        head_leaf.offset = tail_leaf.offset
        head_leaf.length = split_len
        tail_leaf.offset += split_len
        tail_leaf.length = len(child.key)
        self.keeps.split(tail_leaf, head_leaf)
        if tail_leaf.policy is not None:
            tail_leaf.policy.split(tail_leaf, head_leaf)
        return head, action

    def _unregister_node(self, node: UnifiedTreeNode) -> None:
        super()._unregister_node(node)
        self.keeps.gone(node.canopy)
        self.waiting.served(node.canopy)

    def _update_evictable_leaf_sets(self, node: UnifiedTreeNode) -> None:
        if len(self.components) > 1:  # windows and states are locked and kept on their own
            super()._update_evictable_leaf_sets(node)
            return
        # The same for full attention alone.
        data = node.component_data[BASE_COMPONENT_TYPE]
        device = host = False
        if data.lock_ref == 0 and node is not self.root_node:
            if data.value is not None:
                device = True
                for child in node.children.values():
                    if child.component_data[BASE_COMPONENT_TYPE].value is not None:
                        device = False
                        break
            elif data.host_value is not None and data.host_lock_ref == 0:
                host = not node.children
        if device:
            self.evictable_device_leaves.add(node)
        else:
            self.evictable_device_leaves.discard(node)
        if host:
            self.evictable_host_leaves.add(node)
        else:
            self.evictable_host_leaves.discard(node)

    def _usable(self, leaf: UnifiedTreeNode) -> bool:
        return can_end_after(self, leaf, len(leaf.key))

    # ---- for the tiers ----

    def contains(self, node: UnifiedTreeNode) -> bool:
        """Whether ``node`` is still in the tree."""
        return self._node_arena.get(node.id) is node

    def readmit(self, node: UnifiedTreeNode) -> None:
        """``node``'s metadata is about to change: the policies rank it anew afterwards."""
        self.evictable_device_leaves.readmit(node)
        self.evictable_host_leaves.readmit(node)

    def keep_path(self, node: UnifiedTreeNode, until: float, tenant: str | None) -> None:
        """Keep the path to ``node`` until then, as far as the tenant's budget goes."""
        set_offsets(node)
        path = []
        while node is not self.root_node:
            self.readmit(node)
            path.append(node.canopy)
            node = node.parent
        self.keeps.ask(reversed(path), until, tenant, self.clock.now)
