"""SGLang's observer of the tree: every store into a tier and every removal from one.

SGLang calls its recorder of KV events at each of them, also if it publishes none.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from sglang.srt.disaggregation.kv_events import StorageMedium
from sglang.srt.mem_cache.events import KVCacheEventRecorder

from sglang_canopy.radix.counters import DEVICE, HOST
from sglang_canopy.radix.live_request import set_offsets
from sglang_canopy.radix.traffic import is_off_device

if TYPE_CHECKING:
    from sglang.srt.mem_cache.unified_cache.unified_tree_core import UnifiedTreeNode

    from sglang_canopy.radix.tree import Tree


class Recorder(KVCacheEventRecorder):
    """Counts the tokens of each tier, and notifies the policy of evictions. A node counts once per
    tier: SGLang records a host copy again when a state of the node is copied."""

    is_published: Callable[[Any], bool] | None = None
    """Whether the events of a node are published; ``None``: of every node."""

    uncounted_nodes: list[tuple[UnifiedTreeNode, int]] | None = None
    """Nodes that enter the host, and their tokens, to be counted with their metadata."""

    def __init__(self, core: Tree, recorder: KVCacheEventRecorder) -> None:
        self.__dict__.update(recorder.__dict__)
        self._core = core

    def record_store(self, node: UnifiedTreeNode, medium: Any = None, **arguments: Any) -> None:
        if self._should_publish(node):
            super().record_store(node, medium, **arguments)
        core, leaf = self._core, node.canopy
        tier = HOST if medium is StorageMedium.CPU else DEVICE
        set_offsets(node)
        if tier == HOST:
            if leaf.is_on_host:
                return
            leaf.is_on_host = True
        if tier == DEVICE or is_off_device(node):
            core.change_count += 1
        if tier == HOST and self.uncounted_nodes is not None:
            self.uncounted_nodes.append((node, leaf.length))
        elif core.inserting_request is None:
            core.traffic.record_copy(tier, node, leaf.length)
        else:
            core.traffic.record_computed_tokens(leaf.length, core.inserting_request)

    def record_remove(self, node: UnifiedTreeNode, medium: Any = None) -> None:
        if self._should_publish(node):
            super().record_remove(node, medium)
        core, leaf = self._core, node.canopy
        core.change_count += 1
        if medium is StorageMedium.CPU:
            leaf.is_on_host = False
            # No policy chose the copy of KV that the device still has.
            policy = core.live.host_policy if is_off_device(node) else None
            tier, is_demoted = HOST, False
        else:
            policy, tier, is_demoted = core.live.device_policy, DEVICE, node.backuped
        if policy is not None and leaf.policy is policy:  # it may not have been ranked yet
            policy.record_eviction(leaf, leaf.length)
        core.traffic.record_eviction(tier, node, is_demoted)

    def _should_publish(self, node: UnifiedTreeNode) -> bool:
        return self.enabled and (self.is_published is None or self.is_published(node))
