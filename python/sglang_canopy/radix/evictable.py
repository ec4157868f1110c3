"""One tier of the live cache (device or host): the evictable leaves, and the next victim.

SGLang keeps each tier's evictable leaves in a plain set and rebuilds a heap over all of it for every
eviction. ``EvictableLeaves`` is that set, but reports each change to a policy, so that no heap is rebuilt.
"""

from __future__ import annotations

from collections.abc import Callable, Container
from typing import TYPE_CHECKING, Any

from sglang.srt.mem_cache.unified_cache.components import BASE_COMPONENT_TYPE

from sglang_canopy.policy.base import Policy, Victim
from sglang_canopy.policy.structures.lazy_heap import LazyHeap
from sglang_canopy.radix.live_request import NodeLeaf, RequestClock, set_offsets
from sglang_canopy.radix.ttl_groups import HostExpiry
from sglang_canopy.records import Leaf
from sglang_canopy.ttl.table import TTLTable

if TYPE_CHECKING:
    from sglang.srt.mem_cache.unified_cache.unified_tree_core import UnifiedTreeNode

MAX_CHILDREN_READ = 16_384
"""Maximum children that one call of ``lowest_ranked`` reads."""


class EvictableLeaves(set):
    """A tier's evictable nodes, with a policy that receives each change. ``add`` only records the
    node; the policy receives it when the next request arrives or a victim is needed. SGLang adds a
    node before its request is known and often locks it again at once, so most additions never reach
    the policy at all."""

    def __init__(
        self,
        policy: Policy,
        clock: RequestClock,
        ttl_table: TTLTable | None = None,
        is_usable: Callable[[UnifiedTreeNode], bool] | None = None,
    ) -> None:
        super().__init__()
        self.policy = policy
        self.expiry = None if ttl_table is None else HostExpiry(ttl_table)
        self.has_victim_expired = False
        """Whether the last victim's TTL had expired; the policy did not choose it."""
        self.clock = clock
        self.pending: dict[UnifiedTreeNode, float] = {}
        """Nodes that the policy has not received yet, and the clock when they were added."""
        self.is_usable = is_usable
        """Whether a request can use a leaf; ``None`` if requests can use all of them."""
        self.unusable_leaves = LazyHeap()
        """Leaves that no request can use, least recent first. They are evicted before all others;
        the policy does not receive them."""
        self._excluded_nodes: dict[UnifiedTreeNode, None] = {}

    def add(self, node: UnifiedTreeNode) -> None:
        if node not in self:
            set.add(self, node)
            self.pending[node] = self.clock.now

    def discard(self, node: UnifiedTreeNode) -> None:
        if node in self:
            set.discard(self, node)
            if node in self.pending:
                del self.pending[node]
            else:
                self._drop(node)

    def readmit(self, node: UnifiedTreeNode) -> None:
        """Rank ``node`` again later, as its metadata is about to change."""
        if node in self and node not in self.pending:
            self._drop(node)
            self.pending[node] = self.clock.now

    def exclude(self, node: UnifiedTreeNode) -> None:
        """Exclude ``node`` until ``restore_excluded``, as SGLang could not evict it."""
        if node in self:
            self.readmit(node)
            del self.pending[node]
            self._excluded_nodes[node] = None

    def restore_excluded(self) -> None:
        for node in self._excluded_nodes:
            self.pending[node] = self.clock.now
        self._excluded_nodes.clear()

    def _drop(self, node: UnifiedTreeNode) -> None:
        leaf = node.canopy
        if self._excluded_nodes and node in self._excluded_nodes:
            del self._excluded_nodes[node]
        elif self.is_usable is None or not self.unusable_leaves.discard(leaf):
            self.policy.drop(leaf)

    # ---- victims ----

    def admit_pending(self) -> None:
        """Pass all nodes added since the last call to the policy."""
        if not self.pending:
            return
        for node, added_at in self.pending.items():
            if self.is_usable is not None and not self.is_usable(node):
                set_offsets(node)
                self.unusable_leaves.push(node.canopy, 0)
                continue
            leaf = self._prepare_leaf(node, added_at)
            self.policy.admit(leaf, added_at)
            if self.expiry is not None:
                self.expiry.add(leaf, self)
        self.pending.clear()

    def next_victim(self, now: float) -> tuple[UnifiedTreeNode, int] | None:
        """Return the node to evict next and the number of first tokens that the policy keeps."""
        self.has_victim_expired = False
        if self.pending:
            self.admit_pending()
        if self.is_usable is not None:
            unusable_leaf: NodeLeaf | None = self.unusable_leaves.least()  # type: ignore[assignment]
            if unusable_leaf is not None:
                return unusable_leaf.node, 0
        if self.expiry is not None:
            leaf = self.expiry.next_expired(now, self)
            self.has_victim_expired = leaf is not None
            if leaf is not None:
                return leaf.node, 0
        victim = self.policy.victim(now)
        return None if victim is None else (victim.leaf.node, victim.keep_tokens)  # type: ignore[attr-defined]

    def lowest_ranked(self, max_tokens: int, max_leaves: int) -> list[tuple[UnifiedTreeNode, int]]:
        """Return the next victims, and the tokens that the policy keeps of each. They end with
        ``max_leaves``, or once they have ``max_tokens``. The order of eviction is not changed. A parent
        is listed too, after the last of its children on the device."""
        self.admit_pending()
        unread_children = MAX_CHILDREN_READ

        def find_exposed(leaf: Leaf, evicted: Container[Leaf]) -> Leaf | None:
            nonlocal unread_children
            leaf_node: UnifiedTreeNode = leaf.node  # type: ignore[attr-defined]
            if leaf_node.component_data[BASE_COMPONENT_TYPE].value is None:
                return None  # a leaf of the host: its parent on the device is no victim of the host
            node = leaf_node.parent
            kv = node.component_data[BASE_COMPONENT_TYPE]
            # A node without a use is ranked by the time at which it becomes evictable.
            if node.parent is None or kv.value is None or node in self or not node.canopy.hits:
                return None
            if any(component.lock_ref for component in node.component_data):
                return None
            for child in node.children.values():
                unread_children -= 1
                if unread_children < 0:
                    return None
                is_on_device = child.component_data[BASE_COMPONENT_TYPE].value is not None
                if is_on_device and child.canopy not in evicted:
                    return None
            return self._prepare_leaf(node, self.clock.now)

        unusable_leaves: list[Any] = sorted(self.unusable_leaves, key=lambda leaf: leaf.last_access)
        del unusable_leaves[max_leaves:]
        max_tokens -= sum(leaf.length for leaf in unusable_leaves)
        victims: list[Any] = list(map(Victim, unusable_leaves))
        max_leaves -= len(victims)
        victims += _lowest_ranked(self.policy, self.clock.now, max_tokens, max_leaves, find_exposed)
        return [(victim.leaf.node, victim.keep_tokens) for victim in victims]

    def _prepare_leaf(self, node: UnifiedTreeNode, added_at: float) -> NodeLeaf:
        """Return ``node``'s leaf, prepared for the policy, which receives it as of ``added_at``."""
        leaf = node.canopy
        set_offsets(node)
        if leaf.hits == 0:
            _inherit_from_parent(leaf, node, added_at)
        if leaf.policy is not self.policy:
            leaf.policy, leaf.rank_state = self.policy, None
        return leaf

    def withdraw_all(self) -> None:
        """Remove every leaf from the policy, as the tree is being reset."""
        for node in list(self):
            self.discard(node)


def _inherit_from_parent(leaf: NodeLeaf, node: UnifiedTreeNode, now: float) -> None:
    """Give a node without a request (loaded from storage) its parent's attributes."""
    parent = node.parent
    if parent is not None and parent.canopy.hits:
        protection = leaf.awaited_until, leaf.keep_until
        leaf.inherit(parent.canopy)
        leaf.awaited_until, leaf.keep_until = protection  # granted to the parent alone
    leaf.hits = 1
    leaf.created = leaf.last_access = now


def _lowest_ranked(
    policy: Policy,
    now: float,
    max_tokens: int,
    max_leaves: int,
    find_exposed: Callable[[Leaf, Container[Leaf]], Leaf | None],
) -> list[Victim]:
    """Return the next victims, until they have ``max_tokens``, at most ``max_leaves``. Every leaf keeps
    its rank. ``find_exposed(leaf, evicted)`` returns the unadmitted leaf that becomes evictable once
    all leaves in ``evicted`` are evicted, ``leaf`` last, or ``None``."""
    victims: list[Victim] = []
    rank_states: dict[Leaf, Any] = {}
    lent_leaves: set[Leaf] = set()
    try:
        while max_tokens > 0 and len(victims) < max_leaves:
            victim = policy.victim(now)
            if victim is None:
                break
            leaf = victim.leaf
            rank_states[leaf] = leaf.rank_state
            policy.drop(leaf)
            victims.append(victim)
            max_tokens -= max(1, leaf.length - victim.keep_tokens)
            parent_leaf = None if victim.keep_tokens else find_exposed(leaf, rank_states)
            if parent_leaf is not None:
                lent_leaves.add(parent_leaf)
                policy.admit(parent_leaf, now)
    finally:
        for leaf in lent_leaves:
            if leaf not in rank_states:
                policy.drop(leaf)
        for leaf, rank_state in rank_states.items():
            if leaf not in lent_leaves:
                policy.put_back(leaf, rank_state, now)
    return victims
