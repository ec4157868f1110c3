"""The tree core's counters: tokens that enter and leave the device and the host."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sglang.srt.disaggregation.kv_events import StorageMedium

from sglang_canopy.policy.base import Policy
from sglang_canopy.radix.counters import DEVICE, HOST
from sglang_canopy.radix.decisions import Decision, Decisions
from sglang_canopy.radix.live_request import LiveRequest
from sglang_canopy.radix.node_metadata import NodeMetadataCore
from sglang_canopy.radix.scoped import Scoped

if TYPE_CHECKING:
    from sglang.srt.mem_cache.cache_init_params import CacheInitParams
    from sglang.srt.mem_cache.unified_cache.components import ComponentType, TreeComponent
    from sglang.srt.mem_cache.unified_cache.unified_tree_core import UnifiedTreeNode


class TierTrafficCore(NodeMetadataCore):
    """Counts what SGLang moves between the tiers, and tells each policy what it lost."""

    def __init__(
        self, params: CacheInitParams, components: dict[ComponentType, TreeComponent]
    ) -> None:
        self.counters = params.canopy.counters
        self.decisions = Decisions()
        self.inserting: Scoped[LiveRequest] = Scoped()
        """The request whose KV is being inserted."""
        super().__init__(params, components)

    # ---- into a tier ----

    def _add_new_node(self, parent: UnifiedTreeNode, key: Any, *args: Any, **kwargs: Any) -> Any:
        node = super()._add_new_node(parent, key, *args, **kwargs)
        self._count_computed(len(key))
        return node

    def _unevict_node_on_insert(self, node: UnifiedTreeNode, *args: Any, **kwargs: Any) -> None:
        super()._unevict_node_on_insert(node, *args, **kwargs)
        node.canopy.device_since = self.clock.now
        self._count_computed(len(node.key))

    def commit_backup(self, node_id: int, *args: Any, **kwargs: Any) -> None:
        super().commit_backup(node_id, *args, **kwargs)
        node = self.node_by_id(node_id)
        node.canopy.host_since = self.clock.now
        self._count_entered(HOST, node, len(node.key))

    def commit_load_back(
        self, node_id: int, device_indices: Any, kv_xfer: Any, *args: Any, **kwargs: Any
    ) -> Any:
        actions = super().commit_load_back(node_id, device_indices, kv_xfer, *args, **kwargs)
        for loaded in kv_xfer.nodes_to_load or ():
            node = self.node_by_id(loaded)
            node.canopy.device_since = self.clock.now
            self._count_entered(DEVICE, node, len(node.key))
        return actions

    # ---- out of a tier ----

    def _delete_unbacked_device_leaf(
        self, node: UnifiedTreeNode, *args: Any, **kwargs: Any
    ) -> None:
        super()._delete_unbacked_device_leaf(node, *args, **kwargs)
        _tell(self.live.device_policy, node)
        self._count_left(DEVICE, node)

    def _demote(self, node: UnifiedTreeNode, *args: Any, **kwargs: Any) -> None:
        super()._demote(node, *args, **kwargs)
        _tell(self.live.device_policy, node)
        self._count_left(DEVICE, node, demoted=True)

    def _evict_host_leaf(self, node: UnifiedTreeNode, *args: Any, **kwargs: Any) -> None:
        super()._evict_host_leaf(node, *args, **kwargs)
        _tell(self.live.host_policy, node)
        self._count_left(HOST, node)

    def _release_all_component_layers(
        self, node: UnifiedTreeNode, medium: Any, *args: Any, **kwargs: Any
    ) -> None:
        super()._release_all_component_layers(node, medium, *args, **kwargs)
        if medium is StorageMedium.CPU:  # dropped with its device parent, not by host eviction
            self._count_left(HOST, node)

    # ---- counting ----

    def _count_computed(self, tokens: int) -> None:
        """The request that is being inserted brought ``tokens`` to the device."""
        request = self.inserting.value
        label = "default" if request is None else request.label or request.category
        tenant = None if request is None else request.tenant
        self.counters.row(label, tenant).tiers[DEVICE].entered += tokens

    def _count_entered(self, tier: int, node: UnifiedTreeNode, tokens: int) -> None:
        """``tokens`` of ``node`` were copied to ``tier``."""
        leaf = node.canopy
        self.counters.row(leaf.category, leaf.tenant).tiers[tier].entered += tokens

    def _count_left(self, tier: int, node: UnifiedTreeNode, demoted: bool = False) -> None:
        leaf = node.canopy
        self.counters.victims.add(tier, leaf.offset, node.key.raw_token_ids())
        since = leaf.device_since if tier == DEVICE else leaf.host_since
        policy = self.live.device_policy if tier == DEVICE else self.live.host_policy
        self.decisions.add(
            Decision(
                self.clock.now,
                tier,
                leaf.tenant,
                leaf.conversation,
                leaf.category,
                leaf.offset,
                len(node.key),
                leaf.eviction_reason,
                policy.name,
                self.clock.now - leaf.last_access,
                demoted,
            )
        )
        self.counters.evicted(
            tier,
            leaf.category,
            len(node.key),
            leaf.eviction_reason,
            self.clock.now - since,
            demoted,
            leaf.tenant,
        )


def _tell(policy: Policy, node: UnifiedTreeNode) -> None:
    """``policy``'s tier lost ``node``. It hears of it if it ranked it: windows or states may not wait."""
    if node.canopy.policy is policy:
        policy.evicted(node.canopy, node.canopy.length)
