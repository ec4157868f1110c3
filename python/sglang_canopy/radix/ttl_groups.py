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
    """Groups along a request's path of ``blocks``: by block, in the tables of disk and host."""

    request: Request | None
    blocks: int
    disk: list[int]
    host: list[int]


class LiveGroups:
    """The TTL tables of disk and host, and the assignment of nodes to groups."""

    def __init__(self, tiers: TierOptions) -> None:
        self.disk: TTLTable | None = tiers.ttl
        self.host: TTLTable | None = tiers.host_ttl
        self._last_path = _PathGroups(None, 0, [], [])

    def assign(self, leaf: NodeLeaf, request: Request) -> None:
        """Write the groups of ``request``'s path into a node on it."""
        path = self._last_path
        if path.request is not request or path.blocks != len(request.path):
            disk = _groups_along(self.disk, request)
            host = disk if self.host is self.disk else _groups_along(self.host, request)
            path = self._last_path = _PathGroups(request, len(request.path), disk, host)
        block = (leaf.offset + leaf.length) // request.block_tokens - 1
        if path.disk:
            leaf.group = path.disk[min(block, len(path.disk) - 1)] if block >= 0 else RESIDUAL
        if path.host:
            leaf.host_group = path.host[min(block, len(path.host) - 1)] if block >= 0 else RESIDUAL


class _Expiry(NamedTuple):
    """A host copy and when its TTL expires; equal times by number, then by push."""

    expires_at: float
    number: int
    push: int
    leaf: NodeLeaf


class HostExpiry:
    """Host copies by expiry of their TTL. An entry is checked when it becomes due."""

    def __init__(self, table: TTLTable) -> None:
        self.table = table
        self._heap: list[_Expiry] = []
        self._pushes = 0

    def expires_at(self, leaf: NodeLeaf) -> float:
        """Return when ``leaf``'s TTL expires, in seconds on the requests' clock."""
        ttl_s = self.table.ttl_s(leaf.host_group, leaf.category, leaf.ttl_s)
        return max(leaf.last_access + ttl_s, leaf.protected_until())

    def add(self, leaf: NodeLeaf, leaves: set[UnifiedTreeNode]) -> None:
        expires_at = self.expires_at(leaf)
        if math.isinf(expires_at):
            return
        self._pushes += 1
        heapq.heappush(self._heap, _Expiry(expires_at, leaf.number, self._pushes, leaf))
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
                self._pushes += 1
                heapq.heapreplace(self._heap, _Expiry(expires_at, leaf.number, self._pushes, leaf))
            else:
                heapq.heappop(self._heap)
        return None


def _groups_along(table: TTLTable | None, request: Request) -> list[int]:
    return table.groups_along(request.path) if table is not None and table.groups else []
