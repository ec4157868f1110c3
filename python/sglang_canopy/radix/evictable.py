"""One tier of the live cache (device or host): which leaves may go, and which goes next.

SGLang keeps each tier's evictable leaves in a plain set and rebuilds a heap over all of it
on every eviction. ``EvictableLeaves`` is that set, reporting each change to a policy instead,
so that nothing is rebuilt.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from sglang.srt.mem_cache.unified_cache.components import BASE_COMPONENT_TYPE

from sglang_canopy.policy.base import Policy
from sglang_canopy.policy.next_victims import lowest_ranked
from sglang_canopy.radix.leaf import NodeLeaf, set_offsets
from sglang_canopy.radix.live_request import RequestClock
from sglang_canopy.radix.ttl_groups import HostExpiry
from sglang_canopy.records import Leaf
from sglang_canopy.ttl.table import TTLTable

if TYPE_CHECKING:
    from sglang.srt.mem_cache.unified_cache.unified_tree_core import UnifiedTreeNode


class EvictableLeaves(set):
    """A tier's evictable nodes, with a policy that hears of each change.

    NOTE: ``add`` only notes the node; the policy is told when the next request arrives or a
    victim is asked for. SGLang adds a node before its request is known and often locks it
    again at once, so most additions never reach the policy at all.
    """

    def __init__(
        self,
        policy: Policy,
        clock: RequestClock,
        ttl: TTLTable | None = None,
        usable: Callable[[UnifiedTreeNode], bool] | None = None,
    ) -> None:
        super().__init__()
        self.policy = policy
        self.expiry = None if ttl is None else HostExpiry(ttl)
        self.victim_expired = False
        """Whether the last victim's TTL was over; the policy did not choose it."""
        self.clock = clock
        self.pending: dict[UnifiedTreeNode, float] = {}
        """Nodes the policy has not heard of yet, and the clock when they were added."""
        self.usable = usable
        """Whether a request can use a leaf; ``None`` where it can use all of them."""
        self.unusable: dict[UnifiedTreeNode, None] = {}
        """Leaves that none can use. They go first; the policy does not hear of them."""

    def add(self, node: UnifiedTreeNode) -> None:
        if node not in self:
            set.add(self, node)
            self.pending[node] = self.clock.now

    def discard(self, node: UnifiedTreeNode) -> None:
        if node in self:
            set.discard(self, node)
            if node in self.pending:
                del self.pending[node]
            elif node in self.unusable:
                del self.unusable[node]
            else:
                self.policy.drop(node.canopy)

    def readmit(self, node: UnifiedTreeNode) -> None:
        """``node``'s metadata is about to change: the policy ranks it anew afterwards."""
        if node in self and node not in self.pending:
            if node in self.unusable:
                del self.unusable[node]
            else:
                self.policy.drop(node.canopy)
            self.pending[node] = self.clock.now

    def rank_by(self, policy: Policy) -> None:
        """From now on ``policy`` ranks these leaves; it hears of all of them, the oldest first."""
        pending, now = self.pending, self.clock.now
        for node in self:
            if node not in pending:
                self.policy.drop(node.canopy)
        # In an order that does not depend on addresses: ranks must agree on ties, too.
        nodes = sorted(self, key=lambda node: node.id)
        self.pending = {node: pending.get(node, now) for node in nodes}
        self.policy = policy

    def admit_pending(self) -> None:
        """Tell the policy of every node added since the last time."""
        if not self.pending:
            return
        for node, since in self.pending.items():
            if self.usable is not None and not self.usable(node):
                set_offsets(node)
                self.unusable[node] = None
                continue
            leaf = self._ready(node, since)
            self.policy.admit(leaf, since)
            if self.expiry is not None:
                self.expiry.add(leaf, self)
        self.pending.clear()

    def next_victim(self, now: float) -> tuple[UnifiedTreeNode, int] | None:
        """The node to evict next and how many of its first tokens the policy keeps."""
        self.admit_pending()
        if self.unusable:
            return next(iter(self.unusable)), 0
        if self.expiry is not None:
            leaf = self.expiry.next_expired(now, self)
            self.victim_expired = leaf is not None
            if leaf is not None:
                return leaf.node, 0
        victim = self.policy.victim(now)
        return None if victim is None else (victim.leaf.node, victim.keep)  # type: ignore[attr-defined]

    def lowest_ranked(
        self, tokens: int, enough: Callable[[int], bool] = lambda leaves: False
    ) -> list[tuple[UnifiedTreeNode, int]]:
        """The next victims, ``tokens`` in all, and what the policy keeps of each. None is evicted.

        A node counts as the next one's parent would after its children are gone from the device.
        """
        self.admit_pending()
        victims = lowest_ranked(self.policy, tokens, self.clock.now, self._exposed, enough)
        return [(leaf.node, keep) for leaf, keep in victims]  # type: ignore[attr-defined]

    def _exposed(self, leaf: Leaf, gone: set[Leaf]) -> Leaf | None:
        """The parent of ``leaf``, if nothing but ``gone`` keeps it from being evictable."""
        node = leaf.node.parent  # type: ignore[attr-defined]
        data = node.component_data[BASE_COMPONENT_TYPE]
        if node.parent is None or data.value is None or node in self:
            return None
        if any(kind.lock_ref for kind in node.component_data):
            return None
        for child in node.children.values():
            if child.component_data[BASE_COMPONENT_TYPE].value is None:
                continue
            if child.canopy not in gone:
                return None
        return self._ready(node, self.clock.now)

    def _ready(self, node: UnifiedTreeNode, since: float) -> NodeLeaf:
        """``node``'s leaf as the policy may see it, for the first time ``since`` then."""
        leaf = node.canopy
        set_offsets(node)
        if leaf.hits == 0:
            _inherit_from_parent(leaf, node, since)
        if leaf.policy is not self.policy:
            leaf.policy, leaf.slot = self.policy, None
        return leaf

    def empty(self) -> None:
        """Take every leaf back from the policy (the tree is being reset)."""
        for node in list(self):
            self.discard(node)


def _inherit_from_parent(leaf: NodeLeaf, node: UnifiedTreeNode, now: float) -> None:
    """Give a node that no request made (it came from storage) its parent's attributes."""
    parent = node.parent
    if parent is not None and parent.canopy.hits:
        awaited_until = leaf.awaited_until
        leaf.inherit(parent.canopy)
        leaf.awaited_until = awaited_until  # who waits for the parent need not wait for this
    leaf.hits = 1
    leaf.created = leaf.last_access = now
