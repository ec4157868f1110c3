"""Subtree groups of live nodes, and the TTL of host copies (Kareto, section 4.3).

Tables change only between two requests, at a time on the requests' clock, so that every rank
changes them at the same point.
"""

from __future__ import annotations

import heapq
import math
from typing import TYPE_CHECKING, NamedTuple

from sglang_canopy.ttl.table import RESIDUAL, TTLTable

if TYPE_CHECKING:
    from sglang.srt.mem_cache.unified_cache.unified_tree_core import UnifiedTreeNode

    from sglang_canopy.config.tiers import TierOptions
    from sglang_canopy.radix.live_request import NodeLeaf
    from sglang_canopy.records import Request


class _PathGroups(NamedTuple):
    """Groups along a request's path of ``block_count`` blocks: by block, in each tier's table."""

    request: Request | None
    block_count: int
    disk_groups: list[int]
    host_groups: list[int]


class LiveGroups:
    """The TTL tables of disk and host, and the assignment of nodes to groups."""

    def __init__(self, tiers: TierOptions) -> None:
        self.disk_table: TTLTable | None = tiers.ttl
        self.host_table: TTLTable | None = tiers.host_ttl
        self._last_path = _PathGroups(None, 0, [], [])

    def assign(self, leaf: NodeLeaf, request: Request) -> None:
        """Write the groups of ``request``'s path into a node on it."""
        groups = self._last_path
        if groups.request is not request or groups.block_count != len(request.path):
            disk_groups = host_groups = _groups_along(self.disk_table, request)
            if self.host_table is not self.disk_table:
                host_groups = _groups_along(self.host_table, request)
            groups = _PathGroups(request, len(request.path), disk_groups, host_groups)
            self._last_path = groups
        block_index = (leaf.offset + leaf.length) // request.block_tokens - 1
        if groups.disk_groups:
            leaf.group = _group_at(groups.disk_groups, block_index)
        if groups.host_groups:
            leaf.host_group = _group_at(groups.host_groups, block_index)


class _Expiry(NamedTuple):
    """A host copy and when its TTL expires; equal times by number, then by order of pushes."""

    expires_at: float
    number: int
    push_number: int
    leaf: NodeLeaf


class HostExpiry:
    """Host copies by expiry of their TTL. An entry is checked when it becomes due."""

    def __init__(self, table: TTLTable) -> None:
        self.table = table
        self._heap: list[_Expiry] = []
        self._push_count = 0

    def expires_at(self, leaf: NodeLeaf) -> float:
        """Return when ``leaf``'s TTL expires, in seconds on the requests' clock."""
        ttl_s = self.table.ttl_s(leaf.host_group, leaf.category, leaf.ttl_s)
        return max(leaf.last_access + ttl_s, leaf.protected_until())

    def add(self, leaf: NodeLeaf, leaves: set[UnifiedTreeNode]) -> None:
        expires_at = self.expires_at(leaf)
        if math.isinf(expires_at):
            return
        self._push_count += 1
        heapq.heappush(self._heap, _Expiry(expires_at, leaf.number, self._push_count, leaf))
        if len(self._heap) > 4 * len(leaves) + 64:
            latest = {entry.number: entry for entry in self._heap if entry.leaf.node in leaves}
            self._heap = sorted(latest.values())

    def next_expired(self, now: float, leaves: set[UnifiedTreeNode]) -> NodeLeaf | None:
        """Return the leaf of ``leaves`` whose TTL expired first; ``None`` if no TTL has."""
        while self._heap and self._heap[0].expires_at <= now:
            leaf = self._heap[0].leaf
            if leaf.node in leaves:
                expires_at = self.expires_at(leaf)
                if expires_at <= now:
                    return leaf
                self._push_count += 1
                expiry = _Expiry(expires_at, leaf.number, self._push_count, leaf)
                heapq.heapreplace(self._heap, expiry)
            else:
                heapq.heappop(self._heap)
        return None


def _group_at(groups: list[int], block_index: int) -> int:
    return groups[min(block_index, len(groups) - 1)] if block_index >= 0 else RESIDUAL


def _groups_along(table: TTLTable | None, request: Request) -> list[int]:
    return table.groups_along(request.path) if table is not None and table.groups else []
