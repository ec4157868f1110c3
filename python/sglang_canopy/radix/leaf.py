"""The policy's view of one node of SGLang's tree, stored as ``node.canopy``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from sglang_canopy.policy.base import Policy
from sglang_canopy.policy.states import State
from sglang_canopy.radix.counters import CAPACITY
from sglang_canopy.radix.live_request import LiveRequest
from sglang_canopy.records import Leaf
from sglang_canopy.ttl.table import RESIDUAL

if TYPE_CHECKING:
    from sglang.srt.mem_cache.unified_cache.unified_tree_core import UnifiedTreeNode


@dataclass(slots=True, eq=False, repr=False)
class NodeLeaf(Leaf):
    """The policy's view of one SGLang tree node, at ``node.canopy``."""

    node: UnifiedTreeNode = field(kw_only=True)
    device_since: float = 0.0
    """The requests' clock when the tokens entered the device; ``host_since``: the host."""
    host_since: float = 0.0
    eviction_reason: int = CAPACITY
    """Reason of this node's eviction (``counters.REASONS``)."""
    policy: Policy | None = None
    """Policy of the tier that last ranked this node, to which ``slot`` belongs."""
    handover: Any = None
    """The ``Handover`` that passes this leaf to another policy, and that policy's view of the leaf."""
    next_slot: Any = None
    request_number: int = -1
    """Number of the last request counted in ``hits``."""
    state: State | None = None
    """The recurrent state at this node's end on the device, if Canopy orders states."""
    ttl_s: float | None = None
    """TTL below the device requested by a request, in seconds; ``None``: the group's."""
    pin_until: float | None = None
    """Time until which a request pinned the disk copy."""
    host_group: int = RESIDUAL
    """Group in the host tier's table."""
    on_disk: bool = False
    """Whether these pages were written to the disk tier, or read from it."""
    disk_round: int = 0
    """The round (``disk_retry``) in which these pages were last written to disk, or read."""
    disk_written_at: float = float("-inf")
    """The requests' clock at the last write to disk; ``-inf`` if unknown."""
    reported_at: float = float("-inf")
    """The requests' clock when a use was last reported to the disk tier."""

    path: Sequence[int] = ()
    """Block hashes of the last request that used it, shared with the request."""

    def inherit(self, other: Leaf) -> None:
        Leaf.inherit(self, other)
        if isinstance(other, NodeLeaf):
            self.ttl_s, self.pin_until = other.ttl_s, other.pin_until
            self.host_group = other.host_group
            self.on_disk, self.reported_at = other.on_disk, other.reported_at
            self.disk_round, self.disk_written_at = other.disk_round, other.disk_written_at

    def become_head(self, tail: NodeLeaf, tokens: int) -> None:
        """Initialise this new parent node, which holds the first ``tokens`` of ``tail``'s."""
        self.inherit(tail)
        self.request_number = tail.request_number
        self.device_since, self.host_since = tail.device_since, tail.host_since
        self.policy, self.path = tail.policy, tail.path
        self.offset, self.length = tail.offset, tokens

    def set_retention(self, request: LiveRequest) -> None:
        """Apply the TTL and pin that a request asks for, if any.

        In a node that other conversations share, the longest TTL wins, and a request without a TTL
        restores the group's. A pin is never shortened.
        """
        ttl_s = request.ttl_s
        if self.shared and ttl_s is not None:
            ttl_s = None if self.ttl_s is None else max(ttl_s, self.ttl_s)
        self.ttl_s = ttl_s
        if request.pin_s is not None:
            until = request.time + request.pin_s
            self.pin_until = until if self.pin_until is None else max(until, self.pin_until)

    def touch(self, now: float) -> None:
        """Count a use without a request (a direct call of the cache's ``insert``)."""
        if self.hits == 0:
            self.created = now
        self.hits += 1
        self.last_access = now


def set_offsets(node: UnifiedTreeNode) -> None:
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
