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
from sglang_canopy.radix.traffic import left_the_device

if TYPE_CHECKING:
    from sglang.srt.mem_cache.unified_cache.unified_tree_core import UnifiedTreeNode

    from sglang_canopy.radix.tree import Tree


class Recorder(KVCacheEventRecorder):
    """Counts the tokens of each tier, and notifies the policy of evictions.

    A node counts once per tier: SGLang records a host copy again when a state of the node is copied.
    """

    publishes: Callable[[Any], bool] | None = None
    """Whether the events of a node are published; ``None``: of every node."""

    uncounted: list[tuple[UnifiedTreeNode, int]] | None = None
    """Nodes that enter the host, and their tokens, to be counted with their metadata."""

    def __init__(self, core: Tree, recorder: KVCacheEventRecorder) -> None:
        self.__dict__.update(recorder.__dict__)
        self._core = core

    def record_store(self, node: UnifiedTreeNode, medium: Any = None, **arguments: Any) -> None:
        if self._is_published(node):
            super().record_store(node, medium, **arguments)
        core, leaf = self._core, node.canopy
        tier = HOST if medium is StorageMedium.CPU else DEVICE
        set_offsets(node)
        if tier == HOST:
            if leaf.on_host:
                return
            leaf.on_host = True
        if tier == DEVICE or left_the_device(node):
            core.changes += 1
        if tier == HOST and self.uncounted is not None:
            self.uncounted.append((node, leaf.length))
        elif core.inserting is None:
            core.traffic.record_copy(tier, node, leaf.length)
        else:
            core.traffic.record_computed_tokens(leaf.length, core.inserting)

    def record_remove(self, node: UnifiedTreeNode, medium: Any = None) -> None:
        if self._is_published(node):
            super().record_remove(node, medium)
        core, leaf = self._core, node.canopy
        core.changes += 1
        if medium is StorageMedium.CPU:
            leaf.on_host = False
            # No policy chose the copy of KV that the device still has.
            policy = core.live.host_policy if left_the_device(node) else None
            tier, demoted = HOST, False
        else:
            policy, tier, demoted = core.live.device_policy, DEVICE, node.backuped
        if policy is not None and leaf.policy is policy:  # it may not have been ranked yet
            policy.record_eviction(leaf, leaf.length)
        core.traffic.record_eviction(tier, node, demoted)

    def _is_published(self, node: UnifiedTreeNode) -> bool:
        return self.enabled and (self.publishes is None or self.publishes(node))
