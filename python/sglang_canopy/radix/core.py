"""SGLang's Python tree core with Canopy's policies, one for each tier.

The tree mechanism is all SGLang's. Added here: a ``NodeLeaf`` on every node that survives
splits, demotion and coming back; the two ``EvictableLeaves``; eviction by need, which cuts a
leaf's tail instead of dropping the whole node.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from sglang.srt.disaggregation.kv_events import StorageMedium
from sglang.srt.mem_cache.unified_cache.components import BASE_COMPONENT_TYPE
from sglang.srt.mem_cache.unified_cache.unified_tree_core import UnifiedTreeCore

from sglang_canopy.policy.cut import tokens_kept
from sglang_canopy.policy.keep import Keeps
from sglang_canopy.radix.awaited import Awaited
from sglang_canopy.radix.evictable import EvictableLeaves
from sglang_canopy.radix.leaf import NodeLeaf, measure
from sglang_canopy.radix.ttl_groups import LiveGroups
from sglang_canopy.records import Leaf, Request
from sglang_canopy.storage.disk_link import DiskLink
from sglang_canopy.storage.ttl_window import TtlWindow
from sglang_canopy.telemetry.counters import CAPACITY, DEVICE, HOST, TRIM

if TYPE_CHECKING:
    from sglang.srt.mem_cache.cache_init_params import CacheInitParams
    from sglang.srt.mem_cache.unified_cache.components import ComponentType, TreeComponent
    from sglang.srt.mem_cache.unified_cache.unified_tree_core import UnifiedTreeNode

    from sglang_canopy.radix.live import LiveCache

BACKEND = "canopy"
"""The name under which this core is registered with SGLang."""


class CanopyTreeCore(UnifiedTreeCore):
    """A tree core that asks a ``Policy`` for its victims.

    ``params.canopy`` (a ``LiveCache``) holds the policies and settings.
    """

    def __init__(
        self, params: CacheInitParams, components: dict[ComponentType, TreeComponent]
    ) -> None:
        self.live: LiveCache = params.canopy
        self.counters = self.live.counters
        self.clock = 0.0
        """Largest arrival stamp seen, seconds. Eviction's notion of now."""
        device_tokens = params.token_to_kv_pool_allocator.size
        settings = self.live.settings
        self.keeps = Keeps(device_tokens, settings.keep_tenant_share, settings.keep_total_share)
        self.waiting = Awaited(device_tokens)
        self.disk = DiskLink(self)
        self.groups = LiveGroups(self.live.tiers)
        window_s = self.live.tiers.ttl_window_s
        self.ttl_window = (
            None if window_s is None else TtlWindow(window_s, self.live.settings.block_tokens)
        )
        self.request: Request | None = None
        """The request whose KV is being inserted; set by the component for one insert."""
        self.shortfall: Callable[[], int] | None = None
        """Tokens that the allocation being made room for still lacks; set for one walk."""
        super().__init__(params, components)

    def reset(self) -> None:
        for name in ("evictable_device_leaves", "evictable_host_leaves"):
            leaves = getattr(self, name, None)
            if leaves is not None:
                leaves.empty()
        super().reset()
        self.disk.forget()
        self.keeps.clear()
        self.waiting.clear()
        self.tips: dict[tuple[Any, Any], UnifiedTreeNode] = {}
        """Deepest node of each conversation, for hints that come later. Purged as it grows."""
        self.evictable_device_leaves = EvictableLeaves(self.live.device_policy, self)
        self.evictable_host_leaves = EvictableLeaves(
            self.live.host_policy, self, self.live.tiers.host_ttl
        )

    # ---- metadata ----

    def _new_node(self, priority: int = 0) -> UnifiedTreeNode:
        node = UnifiedTreeCore._new_node(self, priority)
        node.canopy = leaf = NodeLeaf(node)
        leaf.device_since = leaf.host_since = self.clock
        return node

    def _add_new_node(self, parent: UnifiedTreeNode, key: Any, *args: Any, **kwargs: Any):
        node = super()._add_new_node(parent, key, *args, **kwargs)
        above = parent.canopy
        node.canopy.offset = above.offset + above.length
        node.canopy.length = len(key)
        self._entered(DEVICE, len(key))
        return node

    def _update_evictable_leaf_sets(self, node: UnifiedTreeNode) -> None:
        # SGLang asks every kind of component; here there is only full attention.
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

    def _split_node(self, key: Any, child: UnifiedTreeNode, split_len: int):
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

    def keep(self, node: UnifiedTreeNode, until: float, tenant: str | None) -> None:
        """Keep the path to ``node`` until then, as far as the tenant's budget goes."""
        measure(node)
        path = []
        while node is not self.root_node:
            self.evictable_device_leaves.reconsider(node)
            self.evictable_host_leaves.reconsider(node)
            path.append(node.canopy)
            node = node.parent
        self.keeps.ask(reversed(path), until, tenant, self.clock)

    def stamp_path(self, node: UnifiedTreeNode, request: Request | None) -> None:
        """Record that ``request`` used every node from the root to ``node``.

        A request counts once a node however often its path is inserted. Without a request
        (direct calls of ``insert``) the node is stamped with the clock alone.
        """
        device, host = self.evictable_device_leaves, self.evictable_host_leaves
        root = self.root_node
        number, asks, done = -1, False, False
        if request is not None:
            number = request.number  # type: ignore[attr-defined]
            asks = request.ttl_s is not None or request.pin_s is not None  # type: ignore[attr-defined]
            done = self.disk.active and request.done  # type: ignore[attr-defined]
            self._remember_tip(request, node)
        grouped = self.groups.disk is not None or self.groups.host is not None
        if request is not None and request.keep_until is not None:
            self.keep(node, request.keep_until, request.tenant)
        while node is not root:
            leaf = node.canopy
            if leaf.awaited_until is not None:
                self.waiting.served(leaf)
            if node in device:
                if node not in device.pending:
                    device.reconsider(node)
            elif node in host:
                host.reconsider(node)
            if request is None:
                leaf.touch(self.clock)
            elif leaf.request_number == number:
                leaf.refresh(request)
            else:
                leaf.stamp(request)
                leaf.request_number = number
            if request is not None:
                if asks or leaf.ttl_s is not None:
                    leaf.ask(request)
                if grouped:
                    measure(node)
                    self.groups.mark(leaf, request)
                if done:
                    self.disk.used(node)
            node = node.parent
        if done:
            self.disk.finished(request)  # type: ignore[arg-type]

    def awaited(self, node: UnifiedTreeNode, request: Request) -> None:
        """A request that waits to be scheduled will use the path to ``node``: protect it.

        SGLang looks a waiting request up again and again, which keeps its prefix recent under
        LRU. Here the deepest node is kept for a bounded time, until the request's own insert
        stamps it or, if it never comes, the time is over.
        """
        leaf = node.canopy
        if node is self.root_node or leaf.request_number == request.number:  # type: ignore[attr-defined]
            return
        if leaf.last_access >= self.clock or self.waiting.is_fresh(leaf, self.clock):
            return
        measure(node)
        self.evictable_device_leaves.reconsider(node)
        self.evictable_host_leaves.reconsider(node)
        self.waiting.protect(leaf, request.tenant, self.clock)
        leaf.last_access = max(leaf.last_access, self.clock)

    # ---- eviction by need ----

    def cut(self, node: UnifiedTreeNode, keep: int, need: int, actions: list) -> UnifiedTreeNode:
        """Split off the part of ``node`` to evict and return the node that holds it.

        ``keep`` tokens the policy wants kept; ``need`` tokens are to be freed. At least one
        page goes; the part that stays ends at a page boundary.
        """
        node.canopy.reason = TRIM if keep > 0 else CAPACITY
        settings = self.live.settings
        kept = tokens_kept(
            len(node.key),
            keep,
            need,
            page=self.page_size,
            quantum=settings.quantum_tokens,
            whole_nodes=settings.whole_nodes,
        )
        if not kept:
            return node
        _, action = self._split_node(node.key, node, kept)
        if action is not None:
            actions.append(action)
        return node

    def delete_leaves(self, need: int, frees: dict[ComponentType, list]) -> int:
        """Delete device leaves until ``need`` tokens are free; their slots go to ``frees``.

        Returns the tokens freed, fewer than ``need`` only when no leaf is left. For caches
        without a lower tier: nothing is demoted.
        """
        leaves, tracker = self.evictable_device_leaves, {BASE_COMPONENT_TYPE: 0}
        actions: list[Any] = []
        while tracker[BASE_COMPONENT_TYPE] < need:
            choice = leaves.next_victim(self.clock)
            if choice is None:
                break
            node = self.cut(*choice, need - tracker[BASE_COMPONENT_TYPE], actions)
            self._delete_unbacked_device_leaf(node, tracker, frees, {}, actions)
        assert not actions, actions  # only copies between tiers leave work behind
        return tracker[BASE_COMPONENT_TYPE]

    def _delete_unbacked_device_leaf(self, node: UnifiedTreeNode, *args: Any, **kwargs: Any):
        super()._delete_unbacked_device_leaf(node, *args, **kwargs)
        self.live.device_policy.evicted(node.canopy, node.canopy.length)
        self._left(DEVICE, node)

    def _demote(self, node: UnifiedTreeNode, *args: Any, **kwargs: Any):
        super()._demote(node, *args, **kwargs)
        self.live.device_policy.evicted(node.canopy, node.canopy.length)
        self._left(DEVICE, node, demoted=True)

    def _evict_host_leaf(self, node: UnifiedTreeNode, *args: Any, **kwargs: Any):
        super()._evict_host_leaf(node, *args, **kwargs)
        self.live.host_policy.evicted(node.canopy, node.canopy.length)
        self._left(HOST, node)

    # ---- what enters and leaves a tier, counted ----

    def _entered(self, tier: int, tokens: int, node: UnifiedTreeNode | None = None) -> None:
        """``tokens`` came into ``tier``: those of ``node``, or those a request is inserting."""
        if node is not None:
            label, tenant = node.canopy.category, node.canopy.tenant
        else:
            request = self.request
            label = "default" if request is None else request.label or request.category
            tenant = None if request is None else request.tenant
        self.counters.row(label, tenant).tiers[tier].entered += tokens

    def _left(self, tier: int, node: UnifiedTreeNode, demoted: bool = False) -> None:
        leaf = node.canopy
        self.counters.victims.add(tier, leaf.offset, node.key.raw_token_ids())
        since = leaf.device_since if tier == DEVICE else leaf.host_since
        self.counters.evicted(
            tier,
            leaf.category,
            len(node.key),
            leaf.reason,
            self.clock - since,
            demoted,
            leaf.tenant,
        )

    def _release_all_component_layers(self, node: UnifiedTreeNode, medium: Any, *args, **kwargs):
        super()._release_all_component_layers(node, medium, *args, **kwargs)
        if medium is StorageMedium.CPU:  # dropped with its device parent, not by host eviction
            self._left(HOST, node)

    def _unevict_node_on_insert(self, node: UnifiedTreeNode, *args: Any, **kwargs: Any):
        super()._unevict_node_on_insert(node, *args, **kwargs)
        node.canopy.device_since = self.clock
        self._entered(DEVICE, len(node.key))

    def commit_backup(self, node_id: int, *args: Any, **kwargs: Any):
        super().commit_backup(node_id, *args, **kwargs)
        node = self.node_by_id(node_id)
        node.canopy.host_since = self.clock
        self._entered(HOST, len(node.key), node)

    def commit_load_back(self, node_id: int, device_indices: Any, kv_xfer: Any, *args, **kwargs):
        actions = super().commit_load_back(node_id, device_indices, kv_xfer, *args, **kwargs)
        for loaded in kv_xfer.nodes_to_load or ():
            node = self.node_by_id(loaded)
            node.canopy.device_since = self.clock
            self._entered(DEVICE, len(node.key), node)
        return actions

    def insert_host(self, node_id: int, key: Any, *args: Any, **kwargs: Any):
        result = super().insert_host(node_id, key, *args, **kwargs)
        hashes = kwargs["hash_value"] if "hash_value" in kwargs else args[1]
        self.disk.came_back(result.inserted_host_node, hashes)
        if not result.host_insert_dropped:
            holder = result.inserted_host_node
            node = self.node_by_id(node_id if holder is None else holder)
            self._entered(HOST, len(key) - result.prefix_len, node)
        return result

    def _build_backup_kv_action(self, node: UnifiedTreeNode, write_back: bool = False):
        action = super()._build_backup_kv_action(node, write_back)
        if write_back and self.disk.active:
            action.node_ids[:0] = [above.id for above in self.disk.not_there_yet(node)]
        return action

    def build_storage_backup_spec(self, node_id: int, *args: Any, **kwargs: Any):
        spec = super().build_storage_backup_spec(node_id, *args, **kwargs)
        if spec is not None:
            self.disk.note(self.node_by_id(node_id))
        return spec

    def snapshot_buffer_backup(self, node_id: int, *args: Any, **kwargs: Any):
        snapshot = super().snapshot_buffer_backup(node_id, *args, **kwargs)
        if snapshot is not None:  # host memory in buffer_only mode: straight to the storage
            self.disk.note_staged(self.node_by_id(node_id))
        return snapshot

    # ---- requests ----

    def arrive(self, request: Request) -> None:
        """A request entered the scheduler. Call once for each, in arrival order."""
        # The policy first hears of what the requests before this one left, in the state that
        # it had then: the simulator, which serves one request at a time, does the same.
        self.evictable_device_leaves.admit_pending()
        self.evictable_host_leaves.admit_pending()
        self.clock = max(self.clock, request.time)
        self.disk.arrive(request.epoch)  # type: ignore[attr-defined]
        if self.ttl_window is not None:
            self.ttl_window.arrive(self)
        self._label(request, "arrive")

    def hint(self, hint: dict[str, Any]) -> None:
        """Apply a client's word on a conversation to what is cached of it already.

        ``hint`` has ``tenant``, ``conversation``, ``time`` and one or more of ``over``,
        ``return_in_s``, ``keep_s``. A conversation that is not cached is ignored.
        """
        node = self.tips.get((hint["tenant"], hint["conversation"]))
        if node is None or self._node_arena.get(node.id) is not node:
            return
        back, keep = hint.get("return_in_s"), hint.get("keep_s")
        if keep is not None:
            self.keep(node, hint["time"] + keep, node.canopy.tenant)
        while node is not self.root_node:
            leaf = node.canopy
            self.evictable_device_leaves.reconsider(node)
            self.evictable_host_leaves.reconsider(node)
            if leaf.conversation == hint["conversation"]:
                leaf.over = hint.get("over", leaf.over) and not leaf.shared
                if back is not None:
                    leaf.return_at = hint["time"] + back
            node = node.parent

    def _remember_tip(self, request: Request, node: UnifiedTreeNode) -> None:
        if request.conversation is None:
            return
        if len(self.tips) > 2 * len(self._node_arena) + 64:
            arena = self._node_arena
            self.tips = {k: n for k, n in self.tips.items() if arena.get(n.id) is n}
        self.tips[request.tenant, request.conversation] = node

    def finish(self, request: Request) -> None:
        """The request's output and stop reason are known."""
        self._label(request, "finish")
        if self.ttl_window is not None:
            self.ttl_window.finished(request)
        if self.live.profile is not None:
            self.live.profile.save_sometimes(self.live.device_policy, self.clock)

    def _label(self, request: Request, event: str) -> None:
        """Announce ``request`` to every policy; its label is that of the first that learns."""
        label = None
        for policy in self.live.listeners:
            given = getattr(policy, event)(request)
            label = given if label is None else label
        request.label = label

    def leaf(self, node_id: int) -> Leaf:
        """The metadata of a node (tests, diagnostics)."""
        return self.node_by_id(node_id).canopy
