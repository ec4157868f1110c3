"""SGLang's Python tree core with Canopy's policies, one for each tier.

The tree mechanism is all SGLang's. Added here, each in a file of its own: metadata on every node
(``node_metadata``), counters (``tier_traffic``),
hints (``conversations``); and in this one requests, eviction by need, which cuts a leaf's tail instead of dropping the whole node, and what
the disk tier is told.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from sglang.srt.mem_cache.unified_cache.components import BASE_COMPONENT_TYPE

from sglang_canopy.policy.cut import tokens_kept
from sglang_canopy.radix.adapter_counts import AdapterCounts
from sglang_canopy.radix.conversations import Conversations
from sglang_canopy.radix.counters import CAPACITY, HOST, TRIM
from sglang_canopy.radix.disk_tier import DiskTier
from sglang_canopy.radix.exchange import Exchange
from sglang_canopy.radix.leaf import set_offsets
from sglang_canopy.radix.live_request import LiveRequest, complete, live_request
from sglang_canopy.radix.match_end import can_end_after
from sglang_canopy.radix.scoped import Scoped
from sglang_canopy.radix.tier_traffic import TierTrafficCore
from sglang_canopy.radix.ttl_groups import LiveGroups
from sglang_canopy.radix.ttl_window import TtlWindow
from sglang_canopy.records import Leaf, Request

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.mem_cache.cache_init_params import CacheInitParams
    from sglang.srt.mem_cache.unified_cache.components import ComponentType, TreeComponent
    from sglang.srt.mem_cache.unified_cache.unified_tree_core import UnifiedTreeNode

    from sglang_canopy.radix.live import LiveCache

BACKEND = "canopy"
"""The name under which this core is registered with SGLang."""


class CanopyTreeCore(TierTrafficCore):
    """A tree core that asks a ``Policy`` for its victims.

    ``params.canopy`` (a ``LiveCache``) holds the policies and settings.
    """

    def __init__(
        self, params: CacheInitParams, components: dict[ComponentType, TreeComponent]
    ) -> None:
        live: LiveCache = params.canopy
        self.disk: DiskTier = live.make_disk_tier(self)
        self.groups = LiveGroups(live.tiers)
        window_s = live.tiers.ttl_window_s
        self.ttl_window = (
            None if window_s is None else TtlWindow(window_s, live.settings.block_tokens)
        )
        self.shortfall: Scoped[Callable[[], int]] = Scoped()
        """Tokens that the allocation lacks for which SGLang walks over victims."""
        self.conversations = Conversations(self)
        self.adapters = AdapterCounts()
        self.exchange = Exchange(self)
        super().__init__(params, components)

    def reset(self) -> None:
        super().reset()
        self.disk.tree_reset()
        self.conversations.clear()
        if self.live.states is not None:
            for state in list(self.live.states.states()):
                self.live.states.drop(state)

    def _unregister_node(self, node: UnifiedTreeNode) -> None:
        self.conversations.gone(node)
        super()._unregister_node(node)

    # ---- requests ----

    def request_of(self, req: Req) -> LiveRequest:
        """``req``'s policy request; made, and announced to the policies, on first use."""
        request = getattr(req, "canopy", None)
        if request is None:
            request = live_request(req, self.clock.now, self.live.settings.block_tokens)
            req.canopy = request
            self.arrive(request)
        return request

    def finish_request(self, req: Req) -> None:
        """``req`` is done: tell the policies, once, how it ended."""
        request = self.request_of(req)
        if request.done:
            return
        complete(request, req)
        self.finish(request)
        hits = (req.cached_tokens_device, req.cached_tokens_host, req.cached_tokens_storage)
        label = request.label or request.category
        self.counters.served(label, request.prompt_tokens, hits, request.tenant)
        self.adapters.served(getattr(req, "canopy_adapter", None), request.prompt_tokens, hits)
        if self.live.meter is not None:
            self.live.meter.ended(request, req.cached_tokens_device + req.cached_tokens_host)

    def arrive(self, request: LiveRequest) -> None:
        """A request entered the scheduler. Call once for each, in arrival order."""
        # The policy first hears of what the requests before this one left, in the state that
        # it had then: the simulator, which serves one request at a time, does the same.
        self.evictable_device_leaves.admit_pending()
        self.evictable_host_leaves.admit_pending()
        # Requests of several HTTP processes, and long prompts, may come later than younger ones.
        request.time = self.clock.advance(request.time)
        self.exchange.return_if_due()
        self.disk.request_arrived(request.epoch)
        if self.ttl_window is not None:
            table = self.ttl_window.request_arrived(self.clock.now, self.disk.capacity)
            if table is not None:
                self.groups.replace_disk_table(table, self._node_arena.values())
                self.disk.set_ttl(table)
        self._announce(request, "arrive")
        self.conversations.arrived(request)

    def finish(self, request: Request) -> None:
        """The request's output and stop reason are known."""
        self._announce(request, "finish")
        if self.ttl_window is not None:
            self.ttl_window.request_finished(request)
        if self.live.profile is not None:
            self.live.profile.save_sometimes(self.live.device_policy, self.clock.now)

    def _announce(self, request: Request, event: str) -> None:
        """Announce ``request`` to every policy; its label is that of the first that learns."""
        label = None
        for policy in self.live.listeners:
            given = getattr(policy, event)(request)
            label = given if label is None else label
        request.label = label

    def hint(self, hint: dict[str, Any]) -> None:
        """Apply a client's hint on a conversation (``Conversations.apply_hint``)."""
        self.conversations.apply_hint(hint)

    def leaf(self, node_id: int) -> Leaf:
        """The metadata of a node (tests, diagnostics)."""
        return self.node_by_id(node_id).canopy

    # ---- what a request uses ----

    def record_use(self, node: UnifiedTreeNode, request: LiveRequest | None) -> None:
        """Record that ``request`` used every node from the root to ``node``.

        A request counts once a node however often its path is inserted. Without a request
        (direct calls of ``insert``) the node is stamped with the clock alone.
        """
        if request is not None:
            self.conversations.remember(request, node)
            if request.keep_until is not None:
                self.keep_path(node, request.keep_until, request.tenant)
        done = request is not None and self.disk.active and request.done
        device, host, root = (
            self.evictable_device_leaves,
            self.evictable_host_leaves,
            self.root_node,
        )
        while node is not root:
            leaf = node.canopy
            if leaf.awaited_until is not None:
                self.waiting.served(leaf)
            if node in device:
                device.readmit(node)
            elif node in host:
                host.readmit(node)
            if request is None:
                leaf.touch(self.clock.now)
            else:
                self._stamp(node, request)
                if done:
                    self.disk.node_used(node)
            node = node.parent
        if done:
            self.disk.request_finished(request)  # type: ignore[arg-type]

    def _stamp(self, node: UnifiedTreeNode, request: LiveRequest) -> None:
        leaf = node.canopy
        if leaf.request_number == request.number:
            leaf.refresh(request)
        else:
            leaf.stamp(request)
            leaf.request_number = request.number
        asks = request.ttl_s is not None or request.pin_s is not None
        if leaf.ttl_s is not None or asks:
            leaf.set_retention(request)
        if self.groups.disk is not None or self.groups.host is not None:
            set_offsets(node)
            self.groups.assign(leaf, request)

    def protect_awaited(self, node: UnifiedTreeNode, request: LiveRequest) -> None:
        """A request that waits to be scheduled will use the path to ``node``: protect it.

        SGLang looks a waiting request up again and again, which keeps its prefix recent under
        LRU. Here the deepest node is kept for a bounded time, until the request's own insert
        stamps it or, if it never comes, the time is over.
        """
        leaf, now = node.canopy, self.clock.now
        if node is self.root_node or leaf.request_number == request.number:
            return
        if leaf.last_access >= now or self.waiting.is_fresh(leaf, now):
            return
        self._protect(node, request.tenant)

    def protect_queue(self, queue: Iterable[tuple[int, LiveRequest]]) -> None:
        """Protect what the waiting requests will use, those first in the queue first.

        ``queue``: handle of the deepest node of each one's path, and the request. What was
        protected before and is not in it loses its protection, so that the budget always goes to
        those who are served next. Beyond the budget a path is touched, as SGLang's LRU does.
        """
        for leaf in self.waiting:
            self.readmit(leaf.node)  # type: ignore[attr-defined]
            self.waiting.served(leaf)
        for node_id, request in queue:
            node = self.node_by_id(node_id)
            leaf = node.canopy
            if node is not self.root_node and leaf.awaited_until is None:
                self._protect(node, request.tenant)

    def _protect(self, node: UnifiedTreeNode, tenant: str | None) -> None:
        """Protect the path to ``node``: it, and the last node of it that is on the device."""
        now, above = self.clock.now, node
        while above is not self.root_node and above.evicted:
            above = above.parent
        ends = [node] if above in (node, self.root_node) else [node, above]
        for end in ends:
            set_offsets(end)
            self.readmit(end)
            end.canopy.last_access = max(end.canopy.last_access, now)
        self.waiting.protect(node.canopy, tenant, now, *(end.canopy for end in ends[1:]))

    # ---- eviction by need ----

    def cut(self, node: UnifiedTreeNode, keep: int, need: int, actions: list) -> UnifiedTreeNode:
        """Split off the part of ``node`` to evict and return the node that holds it.

        ``keep`` tokens the policy wants kept; ``need`` tokens are to be freed. How many go:
        ``policy/cut.py``, the rule of the simulators too. What no request could use without the
        rest (``match_end.py``) goes with it.
        """
        node.canopy.eviction_reason = TRIM if keep > 0 else CAPACITY
        settings = self.live.settings
        kept = tokens_kept(
            len(node.key),
            keep,
            need,
            page=self.page_size,
            quantum=settings.quantum_tokens,
            whole_nodes=settings.whole_nodes,
        )
        if not kept or (len(self.components) > 1 and not can_end_after(self, node, kept)):
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
            choice = leaves.next_victim(self.clock.now)
            if choice is None:
                break
            node = self.cut(*choice, need - tracker[BASE_COMPONENT_TYPE], actions)
            self._delete_unbacked_device_leaf(node, tracker, frees, {}, actions)
        assert not actions, actions  # only copies between tiers leave work behind
        return tracker[BASE_COMPONENT_TYPE]

    # ---- the disk tier ----

    def insert_host(self, node_id: int, key: Any, *args: Any, **kwargs: Any) -> Any:
        result = super().insert_host(node_id, key, *args, **kwargs)
        hashes = kwargs["hash_value"] if "hash_value" in kwargs else args[1]
        self.disk.pages_read(result.inserted_host_node, hashes)
        if not result.host_insert_dropped:
            holder = result.inserted_host_node
            node = self.node_by_id(node_id if holder is None else holder)
            self._count_entered(HOST, node, len(key) - result.prefix_len)
        return result

    def _build_backup_kv_action(self, node: UnifiedTreeNode, write_back: bool = False) -> Any:
        action = super()._build_backup_kv_action(node, write_back)
        if write_back and self.disk.active:
            action.node_ids[:0] = [above.id for above in self.disk.unwritten_ancestors(node)]
        return action

    def build_storage_backup_spec(self, node_id: int, *args: Any, **kwargs: Any) -> Any:
        spec = super().build_storage_backup_spec(node_id, *args, **kwargs)
        if spec is not None:
            self.disk.before_write(self.node_by_id(node_id))
        return spec

    def snapshot_buffer_backup(self, node_id: int, *args: Any, **kwargs: Any) -> Any:
        snapshot = super().snapshot_buffer_backup(node_id, *args, **kwargs)
        if snapshot is not None:  # host memory in buffer_only mode: straight to the storage
            self.disk.before_staged_write(self.node_by_id(node_id))
        return snapshot
