"""One tier of the live cache (device or host): which leaves may go, and which goes next.

SGLang keeps each tier's evictable leaves in a plain set and rebuilds a heap over all of it
on every eviction. ``EvictableLeaves`` is that set, reporting each change to a policy instead,
so that nothing is rebuilt.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sglang_canopy.policy.base import Leaf, Policy
from sglang_canopy.radix.counters import CAPACITY
from sglang_canopy.radix.groups import HostTimes
from sglang_canopy.tier.ttl import RESIDUAL, TTLTable

if TYPE_CHECKING:
    from sglang.srt.mem_cache.unified_cache.unified_tree_core import UnifiedTreeNode

    from sglang_canopy.radix.core import CanopyTreeCore
    from sglang_canopy.radix.link import LiveRequest


class NodeLeaf(Leaf):
    """The policy's view of one SGLang tree node; kept as ``node.canopy``."""

    __slots__ = (
        "device_since",
        "disk_round",
        "host_group",
        "host_since",
        "node",
        "offered_at",
        "on_disk",
        "pin_until",
        "policy",
        "reason",
        "request_number",
        "told",
        "ttl_s",
    )

    def __init__(self, node: UnifiedTreeNode) -> None:
        Leaf.__init__(self)
        self.node = node
        self.device_since = 0.0
        """The core's clock when these tokens entered the device; ``host_since`` likewise."""
        self.host_since = 0.0
        self.reason = CAPACITY
        """Why this node is being evicted (``counters.REASONS``); set by whoever chooses it."""
        self.policy: Policy | None = None
        """Whose ``slot`` it is: the policy of the tier that last ranked this node."""
        self.request_number = -1
        """Number of the last request counted in ``hits``."""
        self.ttl_s: float | None = None
        """Seconds below the device that a request asked for; ``None``: the group's."""
        self.pin_until: float | None = None
        """Until when a request asked to keep the disk copy."""
        self.host_group = RESIDUAL
        """Like ``group``, in the host tier's table."""
        self.on_disk = False
        """Whether these pages were written to the disk tier, or came from it."""
        self.disk_round = 0
        """The round (``disk_retry``) in which these pages were last written there, or read."""
        self.offered_at = float("-inf")
        """The core's clock when they were last written there; long ago where that is unknown."""
        self.told = float("-inf")
        """The core's clock when the disk tier last heard of a use."""

    def inherit(self, other: Leaf) -> None:
        Leaf.inherit(self, other)
        if isinstance(other, NodeLeaf):
            self.ttl_s, self.pin_until = other.ttl_s, other.pin_until
            self.host_group = other.host_group
            self.on_disk, self.told = other.on_disk, other.told
            self.disk_round, self.offered_at = other.disk_round, other.offered_at

    def ask(self, request: LiveRequest) -> None:
        """A request asks for a TTL of its own or for a pin, or for neither.

        Where other conversations run through the node too, the longest TTL wins, and a request
        that asks for none leaves it to the group. A pin is never shortened.
        """
        ttl_s = request.ttl_s
        if self.shared and ttl_s is not None:
            ttl_s = None if self.ttl_s is None else max(ttl_s, self.ttl_s)
        self.ttl_s = ttl_s
        if request.pin_s is not None:
            until = request.time + request.pin_s
            self.pin_until = until if self.pin_until is None else max(until, self.pin_until)

    def touch(self, now: float) -> None:
        """A use by nobody in particular (a direct call of the cache's ``insert``)."""
        if self.hits == 0:
            self.created = now
        self.hits += 1
        self.last_access = now


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


def measure(node: UnifiedTreeNode) -> None:
    """Set offset and length of ``node`` and of every ancestor not measured yet."""
    if node.canopy.length == len(node.key):
        return
    path = []
    while node.parent is not None and node.canopy.length != len(node.key):
        path.append(node)
        node = node.parent
    offset = node.canopy.offset + node.canopy.length
    for child in reversed(path):
        child.canopy.offset = offset
        child.canopy.length = len(child.key)
        offset += child.canopy.length


def _adopt(leaf: NodeLeaf, node: UnifiedTreeNode, now: float) -> None:
    """Give a node that no request made (it came from storage) its parent's attributes."""
    parent = node.parent
    if parent is not None and parent.canopy.hits:
        leaf.inherit(parent.canopy)
    leaf.hits = 1
    leaf.created = leaf.last_access = now
