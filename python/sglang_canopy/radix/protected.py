"""Protected paths of a tree: paths that clients keep, and paths of waiting requests."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from typing import TYPE_CHECKING

from sglang_canopy.config.tiers import TreeSettings
from sglang_canopy.policy.awaited import AwaitedPaths
from sglang_canopy.policy.keep import Keeps
from sglang_canopy.radix.live_request import LiveRequest, NodeLeaf, RequestClock, set_offsets
from sglang_canopy.records import GATEWAY
from sglang_canopy.tenant import ChargedTenants

if TYPE_CHECKING:
    from sglang.srt.mem_cache.unified_cache.unified_tree_core import UnifiedTreeNode


class ProtectedPaths:
    """Grants protection within the tenants' budgets, and revokes it. ``readmit``: called with a node
    before its metadata changes."""

    def __init__(
        self,
        clock: RequestClock,
        readmit: Callable[[UnifiedTreeNode], None],
        device_tokens: int,
        settings: TreeSettings,
    ) -> None:
        self._clock, self._readmit = clock, readmit
        self._charged_tenants = ChargedTenants()
        self.keeps = Keeps(device_tokens, settings.keep_tenant_share, settings.keep_total_share)
        self.awaited = AwaitedPaths(device_tokens)

    def charged_tenant(self, tenant: str | None, source: str) -> Hashable:
        """Return the tenant to charge for a request or hint of ``source``."""
        return self._charged_tenants.choose(tenant, source == GATEWAY, self._clock.now)

    def keep_path(self, node: UnifiedTreeNode, until: float, tenant: Hashable) -> None:
        """Keep the path to ``node`` until ``until``, within the budget of the charged ``tenant``."""
        set_offsets(node)
        leaves = []
        while node.parent is not None:
            self._readmit(node)
            leaves.append(node.canopy)
            node = node.parent
        self.keeps.grant(reversed(leaves), until, tenant, self._clock.now)

    def protect_match(self, node: UnifiedTreeNode, request: LiveRequest) -> None:
        """Protect the path to ``node``, which a waiting request will use. SGLang repeatedly looks up a
        waiting request, which keeps its prefix recent under LRU. Here the deepest node is kept for a
        bounded time, until the request's own insert marks it, or the time expires."""
        leaf, now = node.canopy, self._clock.now
        charged_to = self.charged_tenant(request.tenant, request.source)
        if node.parent is None or leaf.request_number == request.number:
            return
        if leaf.last_access >= now or self.awaited.is_fresh(leaf, now):
            return
        self._protect(node, charged_to)

    def protect_queue(self, queue: Iterable[tuple[UnifiedTreeNode, LiveRequest]]) -> None:
        """Protect the paths of the waiting requests, from the head of the queue on. ``queue``: the
        deepest node of each path, and the request. Paths that left the queue lose their protection, so
        that the budget serves the next requests to be admitted. Beyond the budget a path is only
        touched, as under SGLang's LRU."""
        for leaf in self.awaited:
            self._readmit(leaf.node)  # type: ignore[attr-defined]
            self.awaited.end_protection(leaf)
        for node, request in queue:
            if node.parent is not None and node.canopy.awaited_until is None:
                self._protect(node, self.charged_tenant(request.tenant, request.source))

    def drop_leaf(self, leaf: NodeLeaf) -> None:
        """Handle the removal of ``leaf``'s node from the tree."""
        self.keeps.release(leaf)
        self.awaited.end_protection(leaf)

    def clear(self) -> None:
        """Remove all protection, as the tree is being emptied."""
        self.keeps.clear()
        self.awaited.clear()

    def _protect(self, node: UnifiedTreeNode, tenant: Hashable) -> None:
        """Protect the path to ``node``: the node, and the path's last node on the device."""
        now, device_node = self._clock.now, node
        while device_node.parent is not None and device_node.evicted:
            device_node = device_node.parent
        has_device_end = device_node is not node and device_node.parent is not None
        device_ends = [device_node] if has_device_end else []
        for end in (node, *device_ends):
            set_offsets(end)
            self._readmit(end)
            end.canopy.last_access = max(end.canopy.last_access, now)
        self.awaited.protect(node.canopy, tenant, now, *(end.canopy for end in device_ends))
