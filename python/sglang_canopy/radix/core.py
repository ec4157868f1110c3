"""SGLang's Python tree core with a ``NodeLeaf`` on every node and a policy for each tier.

The tree mechanism is SGLang's. Canopy's state is in separate parts: evictable leaves
(``evictable``), protected paths (``protected``), requests (``requests``), counters (``traffic``),
and the tier below the host (``disk_tier``).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.srt.mem_cache.unified_cache.components import BASE_COMPONENT_TYPE
from sglang.srt.mem_cache.unified_cache.unified_tree_core import UnifiedTreeCore

from sglang_canopy.policy.base import tokens_kept
from sglang_canopy.radix.conversations import Conversations
from sglang_canopy.radix.counters import CAPACITY, HOST, TRIM
from sglang_canopy.radix.disk_tier import DiskTier
from sglang_canopy.radix.evictable import EvictableLeaves
from sglang_canopy.radix.live_request import LiveRequest, NodeLeaf, RequestClock
from sglang_canopy.radix.missed import MissedTokens
from sglang_canopy.radix.offset_walk import OffsetWalkCore
from sglang_canopy.radix.protected import ProtectedPaths
from sglang_canopy.radix.recorder import Recorder
from sglang_canopy.radix.requests import TreeRequests
from sglang_canopy.radix.traffic import TierTraffic
from sglang_canopy.radix.ttl_groups import LiveGroups

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.mem_cache.base_prefix_cache import InsertParams
    from sglang.srt.mem_cache.cache_init_params import CacheInitParams
    from sglang.srt.mem_cache.unified_cache.components import TreeComponent
    from sglang.srt.mem_cache.unified_cache.unified_tree_core import UnifiedTreeNode

    from sglang_canopy.radix.live import LivePolicies

TREE_CORE_BACKEND = "canopy"
"""Name under which this core is registered with SGLang."""


class CanopyTreeCore(OffsetWalkCore):
    """A tree core whose victims are chosen by a ``Policy``. ``params.canopy`` (a ``LivePolicies``)
    holds the policies and settings."""

    evictable_device_leaves: EvictableLeaves
    evictable_host_leaves: EvictableLeaves
    kv_events: Any

    def __init__(
        self, params: CacheInitParams, components: dict[ComponentType, TreeComponent]
    ) -> None:
        live: LivePolicies = params.canopy
        allocator = params.token_to_kv_pool_allocator
        live.device_tokens, live.count_free_tokens = allocator.size, allocator.available_size
        self.live = live
        self.clock = RequestClock()
        self.protected = ProtectedPaths(self.clock, self.readmit, allocator.size, live.settings)
        self.disk: DiskTier = live.make_disk_tier(self)
        self.missed = MissedTokens(live.settings.block_tokens, params.page_size, live, self.disk)
        self.traffic = TierTraffic(live, self.clock, self.missed)
        self.groups = LiveGroups(live.tiers)
        self.conversations = Conversations(self)
        self.requests = TreeRequests(self, self.conversations)
        # SGLang's methods have no argument for these two.
        self.inserting_request: LiveRequest | None = None
        """The request whose KV is being inserted."""
        self.count_shortfall: Callable[[], int] | None = None
        """Returns the tokens that the allocation still lacks, while SGLang evicts for it."""
        self.change_count = 0
        """Rises with every change that can alter a match of full attention."""
        super().__init__(params, components)
        self.kv_events = Recorder(self, self.kv_events)

    def reset(self) -> None:
        self.change_count += 1
        if hasattr(self, "evictable_device_leaves"):
            self.evictable_device_leaves.withdraw_all()
            self.evictable_host_leaves.withdraw_all()
            self.traffic.record_flush(self._node_arena.values())
        super().reset()
        self.protected.clear()
        live = self.live
        is_usable = self._is_usable if len(self.components) > 1 else None
        self.evictable_device_leaves = EvictableLeaves(
            live.device_policy, self.clock, None, is_usable
        )
        self.evictable_host_leaves = EvictableLeaves(
            live.host_policy, self.clock, live.tiers.host_ttl, is_usable
        )
        self.disk.record_reset()
        self.conversations.clear()

    def contains(self, node: UnifiedTreeNode) -> bool:
        return self._node_arena.get(node.id) is node

    def match_version(self, req: Req) -> tuple[int, int, int]:
        """Return a value that differs if a new match of ``req`` could find more or less full attention."""
        return self.change_count, len(req.output_ids), req.retraction_count

    def readmit(self, node: UnifiedTreeNode) -> None:
        """Let the policies rank ``node`` again later, as its metadata is about to change."""
        self.evictable_device_leaves.readmit(node)
        self.evictable_host_leaves.readmit(node)

    def begin_insert(self, params: InsertParams) -> Any:
        self.inserting_request = getattr(params, "canopy", None)
        return super().begin_insert(params)

    def end_insert(self) -> list[Any]:
        self.inserting_request = None
        return super().end_insert()

    # ---- creation, split and removal of nodes ----

    def _new_node(self, priority: int = 0) -> UnifiedTreeNode:
        node = UnifiedTreeCore._new_node(self, priority)
        self.change_count += 1
        node.canopy = NodeLeaf(number=node.id, node=node)
        return node

    def _split_node(self, key: Any, child: UnifiedTreeNode, split_len: int) -> Any:
        head, action = super()._split_node(key, child, split_len)
        tail_leaf, head_leaf = child.canopy, head.canopy
        head_leaf.become_head(tail_leaf, split_len)
        tail_leaf.offset += split_len
        tail_leaf.length = len(child.key)
        if tail_leaf.keep_until is not None:
            self.protected.keeps.split(tail_leaf, head_leaf)
        if tail_leaf.awaited_until is not None:
            self.protected.awaited.split(tail_leaf, head_leaf)
        for leaves in (self.evictable_device_leaves, self.evictable_host_leaves):
            if tail_leaf.policy is leaves.policy:
                leaves.policy.split(tail_leaf, head_leaf)
        return head, action

    def _unregister_node(self, node: UnifiedTreeNode) -> None:
        self.change_count += 1
        leaf = node.canopy
        if leaf.conversation is not None:
            self.conversations.move_end_to_parent(node)
        super()._unregister_node(node)
        if leaf.keep_until is not None or leaf.awaited_until is not None:
            self.protected.drop_leaf(leaf)

    def _is_usable(self, node: UnifiedTreeNode) -> bool:
        return can_end_after(self, node, len(node.key))

    # ---- evict the tokens needed ----

    def split_for_eviction(
        self,
        node: UnifiedTreeNode,
        keep_tokens: int,
        needed_tokens: int,
        actions: list | None = None,
    ) -> UnifiedTreeNode:
        """Split off the part of ``node`` to evict and return the node that holds it. ``keep_tokens``:
        that the policy keeps; ``needed_tokens``: to free. ``tokens_kept`` decides the number to evict,
        as in the simulators. A kept part that no request could use without the rest (``can_end_after``)
        is evicted too."""
        leaf, settings = node.canopy, self.live.settings
        leaf.eviction_reason = TRIM if keep_tokens > 0 else CAPACITY
        length = leaf.length or len(node.key)
        if keep_tokens <= 0 and length <= needed_tokens:
            return node  # the whole node is needed: ``tokens_kept`` is 0
        kept_tokens = tokens_kept(
            length,
            keep_tokens,
            needed_tokens,
            page_tokens=self.page_size,
            quantum_tokens=settings.quantum_tokens,
            whole_nodes=settings.whole_nodes,
        )
        if not kept_tokens or (
            len(self.components) > 1 and not can_end_after(self, node, kept_tokens)
        ):
            return node
        _, action = self._split_node(node.key, node, kept_tokens)
        if action is not None:
            assert actions is not None, action
            actions.append(action)
        return node

    def delete_leaves(self, needed_tokens: int, freed_slots: dict[ComponentType, list]) -> int:
        """Delete device leaves until ``needed_tokens`` are freed; their slots are added to ``freed_slots``.
        Returns the tokens freed, fewer than ``needed_tokens`` only if no leaf is left. For caches
        without a lower tier, as no node is demoted."""
        leaves, tracker = self.evictable_device_leaves, {BASE_COMPONENT_TYPE: 0}
        while tracker[BASE_COMPONENT_TYPE] < needed_tokens:
            victim = leaves.next_victim(self.clock.now)
            if victim is None:
                break
            victim_node, keep_tokens = victim
            # Withdraw the leaf first, so that the policy does not rank again the part evicted next.
            leaves.readmit(victim_node)
            missing_tokens = needed_tokens - tracker[BASE_COMPONENT_TYPE]
            node = self.split_for_eviction(victim_node, keep_tokens, missing_tokens)
            step = self.evict_device_leaf(node.id, is_write_back=False)
            for component_type, slots in step.device_frees.items():
                freed_slots.setdefault(component_type, []).extend(slots)
            tracker[BASE_COMPONENT_TYPE] += step.tracker[BASE_COMPONENT_TYPE]
            step.device_frees.clear()
        return tracker[BASE_COMPONENT_TYPE]

    # ---- the disk tier ----

    def insert_host(self, node_id: int, key: Any, *args: Any, **kwargs: Any) -> Any:
        loaded_nodes: list[tuple[UnifiedTreeNode, int]] = []
        self.kv_events.uncounted_nodes = loaded_nodes
        try:
            result = super().insert_host(node_id, key, *args, **kwargs)
        finally:
            self.kv_events.uncounted_nodes = None
        hashes = kwargs["hash_value"] if "hash_value" in kwargs else args[1]
        # The nodes get their categories.
        self.disk.record_pages_read(result.inserted_host_node, hashes)
        for node, tokens in loaded_nodes:
            while tokens > 0:  # the metadata may have split the node
                self.traffic.record_copy(HOST, node, node.canopy.length)
                tokens, node = tokens - node.canopy.length, node.parent
        return result

    def _build_backup_kv_action(self, node: UnifiedTreeNode, write_back: bool = False) -> Any:
        action = super()._build_backup_kv_action(node, write_back)
        if write_back and self.disk.active:
            action.node_ids[:0] = [ancestor.id for ancestor in self.disk.unwritten_ancestors(node)]
        return action

    def build_storage_backup_spec(self, node_id: int, *args: Any, **kwargs: Any) -> Any:
        if self.disk.suspended:
            return None  # SGLang writes nothing
        spec = super().build_storage_backup_spec(node_id, *args, **kwargs)
        if spec is not None:
            self.disk.before_write(self.node_by_id(node_id))
        return spec

    def snapshot_buffer_backup(self, node_id: int, *args: Any, **kwargs: Any) -> Any:
        snapshot = super().snapshot_buffer_backup(node_id, *args, **kwargs)
        if snapshot is not None:  # host memory in buffer_only mode: written directly to the storage
            self.disk.before_staged_write(self.node_by_id(node_id))
        return snapshot


def can_end_after(core: UnifiedTreeCore, node: UnifiedTreeNode, tokens: int) -> bool:
    """Return whether a lookup can end after ``tokens`` (1 or more) of ``node``. A request continues
    from a node only if the node has the state at its end (Mamba, linear attention) and a whole window
    of KV before it (sliding windows), on the device or on the host. Full KV beyond the last such
    position cannot be used until a request has computed the missing state."""
    by_type = core.components_by_type
    if ComponentType.MAMBA in by_type and (
        tokens < len(node.key) or not _has_state(node, ComponentType.MAMBA)
    ):
        return False
    sliding_window = by_type.get(ComponentType.SWA)
    return sliding_window is None or _has_whole_window(core, sliding_window, node, tokens)


def _has_state(node: UnifiedTreeNode, component_type: ComponentType) -> bool:
    """Return whether ``node`` has its state on the device or host, as SGLang's lookups require."""
    state = node.component_data[component_type]
    return state.value is not None or state.host_value is not None


def _has_whole_window(
    core: UnifiedTreeCore, sliding_window: TreeComponent, node: UnifiedTreeNode, tokens: int
) -> bool:
    if not sliding_window.gates_prefix_match:
        return True
    missing_tokens = sliding_window.sliding_window_size
    while node is not core.root_node:
        if not _has_state(node, ComponentType.SWA):
            return False
        missing_tokens -= tokens
        if missing_tokens <= 0:
            return True
        node = node.parent
        tokens = len(node.key) if node.key is not None else 0
    return True
