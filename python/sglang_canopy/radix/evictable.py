"""One tier of the live cache (device or host): the evictable leaves, and the next victim.

SGLang keeps each tier's evictable leaves in a plain set and rebuilds a heap over all of it for
every eviction. ``EvictableLeaves`` is that set, but reports each change to a policy, so that no
heap is rebuilt.
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
    """A tier's evictable nodes, with a policy that receives each change.

    NOTE: ``add`` only notes the node; the policy receives it when the next request arrives or a
    victim is needed. SGLang adds a node before its request is known and often locks it
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
        """Whether the last victim's TTL had expired; the policy did not choose it."""
        self.clock = clock
        self.pending: dict[UnifiedTreeNode, float] = {}
        """Nodes that the policy has not received yet, and the clock when they were added."""
        self.usable = usable
        """Whether a request can use a leaf; ``None`` if requests can use all of them."""
        self.unusable = LazyHeap()
        """Leaves that no request can use, least recent first.

        They are evicted before all others; the policy does not receive them.
        """
        self._set_aside: dict[UnifiedTreeNode, None] = {}

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

    def set_aside(self, node: UnifiedTreeNode) -> None:
        """Exclude ``node`` until ``restore_set_aside``, as SGLang could not evict it."""
        if node in self:
            self.readmit(node)
            del self.pending[node]
            self._set_aside[node] = None

    def restore_set_aside(self) -> None:
        for node in self._set_aside:
            self.pending[node] = self.clock.now
        self._set_aside.clear()

    def _drop(self, node: UnifiedTreeNode) -> None:
        leaf = node.canopy
        if self._set_aside and node in self._set_aside:
            del self._set_aside[node]
        elif self.usable is None or not self.unusable.discard(leaf):
            self.policy.drop(leaf)

    # ---- victims ----

    def admit_pending(self) -> None:
        """Pass all nodes added since the last call to the policy."""
        if not self.pending:
            return
        for node, since in self.pending.items():
            if self.usable is not None and not self.usable(node):
                set_offsets(node)
                self.unusable.push(node.canopy, 0)
                continue
            leaf = self._prepare_leaf(node, since)
            self.policy.admit(leaf, since)
            if self.expiry is not None:
                self.expiry.add(leaf, self)
        self.pending.clear()

    def next_victim(self, now: float) -> tuple[UnifiedTreeNode, int] | None:
        """Return the node to evict next and the number of first tokens that the policy keeps."""
        self.victim_expired = False
        if self.pending:
            self.admit_pending()
        if self.usable is not None:
            unusable: NodeLeaf | None = self.unusable.least()  # type: ignore[assignment]
            if unusable is not None:
                return unusable.node, 0
        if self.expiry is not None:
            leaf = self.expiry.next_expired(now, self)
            self.victim_expired = leaf is not None
            if leaf is not None:
                return leaf.node, 0
        victim = self.policy.victim(now)
        return None if victim is None else (victim.leaf.node, victim.keep_tokens)  # type: ignore[attr-defined]

    def lowest_ranked(self, tokens: int, leaves: int) -> list[tuple[UnifiedTreeNode, int]]:
        """Return the next victims, and the tokens that the policy keeps of each.

        At most ``tokens`` tokens in all and ``leaves`` leaves. The order of eviction is not
        changed. A node also counts as the parent of the victims before it, if only these keep it
        from being evictable.
        """
        self.admit_pending()
        unread = MAX_CHILDREN_READ

        def exposed(leaf: Leaf, evicted: Container[Leaf]) -> Leaf | None:
            nonlocal unread
            below: UnifiedTreeNode = leaf.node  # type: ignore[attr-defined]
            if below.component_data[BASE_COMPONENT_TYPE].value is None:
                return None  # a leaf of the host: its parent on the device is no victim of the host
            node = below.parent
            data = node.component_data[BASE_COMPONENT_TYPE]
            # A node without a use is ranked by the time at which it becomes evictable.
            if node.parent is None or data.value is None or node in self or not node.canopy.hits:
                return None
            if any(kind.lock_ref for kind in node.component_data):
                return None
            for child in node.children.values():
                unread -= 1
                if unread < 0:
                    return None
                on_device = child.component_data[BASE_COMPONENT_TYPE].value is not None
                if on_device and child.canopy not in evicted:
                    return None
            return self._prepare_leaf(node, self.clock.now)

        first: list[Any] = sorted(self.unusable, key=lambda leaf: leaf.last_access)[:leaves]
        tokens -= sum(leaf.length for leaf in first)
        victims: list[Any] = _lowest_ranked(
            self.policy, self.clock.now, tokens, leaves - len(first), exposed
        )
        return [(leaf.node, keep) for leaf, keep in [(leaf, 0) for leaf in first] + victims]

    def _prepare_leaf(self, node: UnifiedTreeNode, since: float) -> NodeLeaf:
        """Return ``node``'s leaf, prepared for the policy, which receives it as of ``since``."""
        leaf = node.canopy
        set_offsets(node)
        if leaf.hits == 0:
            _inherit_from_parent(leaf, node, since)
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
    tokens: int,
    leaves: int,
    exposed: Callable[[Leaf, Container[Leaf]], Leaf | None],
) -> list[Victim]:
    """Return the next victims, up to ``tokens`` tokens or ``leaves`` leaves, whichever is less.

    Every leaf keeps its rank. ``exposed(leaf, evicted)`` returns the unadmitted leaf that becomes
    evictable once all leaves in ``evicted`` are evicted, ``leaf`` last, or ``None``.
    """
    victims: list[Victim] = []
    evicted: dict[Leaf, Any] = {}
    lent: set[Leaf] = set()
    try:
        while tokens > 0 and len(victims) < leaves:
            victim = policy.victim(now)
            if victim is None:
                break
            leaf = victim.leaf
            evicted[leaf] = leaf.rank_state
            policy.drop(leaf)
            victims.append(victim)
            tokens -= max(1, leaf.length - victim.keep_tokens)
            above = None if victim.keep_tokens else exposed(leaf, evicted)
            if above is not None:
                lent.add(above)
                policy.admit(above, now)
    finally:
        for leaf in lent:
            if leaf not in evicted:
                policy.drop(leaf)
        for leaf, rank_state in evicted.items():
            if leaf not in lent:
                policy.put_back(leaf, rank_state, now)
    return victims
