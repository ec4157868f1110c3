"""One tier of the live cache (device or host): which leaves may go, and which goes next.

SGLang keeps each tier's evictable leaves in a plain set and rebuilds a heap over all of it
on every eviction. ``EvictableLeaves`` is that set, reporting each change to a policy instead,
so that nothing is rebuilt.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sglang_canopy.policy.base import Policy
from sglang_canopy.radix.leaf import NodeLeaf, measure
from sglang_canopy.radix.ttl_groups import HostTimes
from sglang_canopy.ttl.table import TTLTable

if TYPE_CHECKING:
    from sglang.srt.mem_cache.unified_cache.unified_tree_core import UnifiedTreeNode

    from sglang_canopy.radix.core import CanopyTreeCore


class EvictableLeaves(set):
    """A tier's evictable nodes, with a policy that hears of each change.

    NOTE: ``add`` only notes the node; the policy is told when the next request arrives or a
    victim is asked for. SGLang adds a node before its request is known and often locks it
    again at once, so most additions never reach the policy at all.
    """

    def __init__(self, policy: Policy, core: CanopyTreeCore, ttl: TTLTable | None = None) -> None:
        super().__init__()
        self.policy = policy
        self.times = None if ttl is None else HostTimes(ttl)
        self.expired = False
        """Whether the last victim's time was over, whatever the policy thinks of it."""
        self.core = core
        self.pending: dict[UnifiedTreeNode, float] = {}
        """Nodes the policy has not heard of yet, and the clock when they were added."""

    def add(self, node: UnifiedTreeNode) -> None:
        if node not in self:
            set.add(self, node)
            self.pending[node] = self.core.clock

    def discard(self, node: UnifiedTreeNode) -> None:
        if node in self:
            set.discard(self, node)
            if node in self.pending:
                del self.pending[node]
            else:
                self.policy.drop(node.canopy)

    def reconsider(self, node: UnifiedTreeNode) -> None:
        """What the policy knows of ``node`` is about to change: admit it anew later."""
        if node in self and node not in self.pending:
            self.policy.drop(node.canopy)
            self.pending[node] = self.core.clock

    def admit_pending(self) -> None:
        """Tell the policy of every node added since the last time."""
        if not self.pending:
            return
        for node, since in self.pending.items():
            leaf = node.canopy
            measure(node)
            if leaf.hits == 0:
                _adopt(leaf, node, since)
            if leaf.policy is not self.policy:
                leaf.policy, leaf.slot = self.policy, None
            self.policy.admit(leaf, since)
            if self.times is not None:
                self.times.add(leaf, self)
        self.pending.clear()

    def next_victim(self, now: float) -> tuple[UnifiedTreeNode, int] | None:
        """The node to evict next and how many of its first tokens the policy keeps."""
        self.admit_pending()
        if self.times is not None:
            leaf = self.times.over(now, self)
            self.expired = leaf is not None
            if leaf is not None:
                return leaf.node, 0
        victim = self.policy.victim(now)
        return None if victim is None else (victim.leaf.node, victim.keep)  # type: ignore[attr-defined]

    def empty(self) -> None:
        """Take every leaf back from the policy (the tree is being reset)."""
        for node in list(self):
            self.discard(node)


def _adopt(leaf: NodeLeaf, node: UnifiedTreeNode, now: float) -> None:
    """Give a node that no request made (it came from storage) its parent's attributes."""
    parent = node.parent
    if parent is not None and parent.canopy.hits:
        leaf.inherit(parent.canopy)
    leaf.hits = 1
    leaf.created = leaf.last_access = now
