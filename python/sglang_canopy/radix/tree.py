"""The interface of ``CanopyTreeCore`` for the parts of a tree and the tier below it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol

from sglang_canopy.radix.disk_tier import DiskTier
from sglang_canopy.radix.evictable import EvictableLeaves
from sglang_canopy.radix.live import LivePolicies
from sglang_canopy.radix.live_request import LiveRequest, RequestClock
from sglang_canopy.radix.missed import MissedTokens
from sglang_canopy.radix.protected import ProtectedPaths
from sglang_canopy.radix.traffic import TierTraffic
from sglang_canopy.radix.ttl_groups import LiveGroups

if TYPE_CHECKING:
    from sglang.srt.mem_cache.unified_cache.unified_tree_core import UnifiedTreeNode


class Tree(Protocol):
    """SGLang's tree with a ``NodeLeaf`` on every node; attributes as in ``core.CanopyTreeCore``."""

    live: LivePolicies
    clock: RequestClock
    missed: MissedTokens
    disk: DiskTier
    groups: LiveGroups
    protected: ProtectedPaths
    traffic: TierTraffic
    inserting_request: LiveRequest | None
    """The request whose KV is being inserted."""
    change_count: int
    """Rises with every change that can alter a match of full attention."""
    evictable_device_leaves: EvictableLeaves
    evictable_host_leaves: EvictableLeaves
    page_size: int
    root_node: UnifiedTreeNode
    _node_arena: Mapping[int, UnifiedTreeNode]

    def contains(self, node: UnifiedTreeNode) -> bool:
        """Return whether ``node`` is still in the tree."""

    def readmit(self, node: UnifiedTreeNode) -> None:
        """Let the policies rank ``node`` again later, as its metadata is about to change."""

    def node_by_id(self, node_id: int) -> UnifiedTreeNode:
        """Return the node of SGLang's handle."""

    def build_backup_kv_action(self, node_id: int) -> Any:
        """Return SGLang's action that copies a node to the host."""

    def _split_node(self, key: Any, child: UnifiedTreeNode, split_len: int) -> tuple[Any, Any]:
        """Perform SGLang's split. Returns the new node above ``child``, and any copy action."""
