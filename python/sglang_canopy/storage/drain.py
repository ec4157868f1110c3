"""Write the KV that only memory holds to the disk tier, before the server ends.

Runs on the scheduler thread after the last request. Nodes are written by depth in the tree, those of one
node from the newest on. All ranks write the same pages: before each node they agree on the bytes that
the slowest of them can still write, at its measured speed.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sglang_canopy.disk.store import DiskStore
from sglang_canopy.radix.tree import Tree
from sglang_canopy.ranks import least_of_ranks, true_on_all
from sglang_canopy.tenant import is_documents_key

if TYPE_CHECKING:
    from sglang.srt.mem_cache.base_prefix_cache import DecLockRefParams
    from sglang.srt.mem_cache.unified_cache.unified_tree_core import UnifiedTreeNode
    from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

logger = logging.getLogger(__name__)

FIRST_BYTES = 32 << 20
"""Bytes written before the speed is measured."""
BATCH_PAGES = 64
"""Pages of small nodes between two agreements."""
SAFETY = 0.8
"""Share of the measured speed that is relied on."""
_WAIT_S = 0.002
_WAIT = -1


@dataclass(slots=True)
class Drained:
    pages: int = 0
    """Pages written by this rank."""
    lost_pages: int = 0
    """Pages that only memory holds: time ran out, or the disk tier refused them."""
    seconds: float = 0.0


class Drain:
    """One drain of the pages that ``store`` lacks."""

    def __init__(
        self,
        tree: Tree,
        cache: UnifiedRadixCache,
        store: DiskStore,
        seconds: float,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self.tree, self.cache, self.store = tree, cache, store
        self._monotonic = monotonic
        self._began = monotonic()
        self._ends = self._began + seconds
        pool = cache.cache_controller.mem_pool_host
        self._page_bytes = int(pool.size_per_token) * tree.page_size
        self._host_pages = int(pool.size) // tree.page_size
        self._pages_of: dict[int, int] = {}
        """Number of pages passed on, by node."""
        self._passed_on = 0
        self._locked: dict[int, DecLockRefParams] = {}
        """Locks of unwritten nodes that only the host holds, by depth in the tree."""

    def run(self) -> Drained:
        """Write until everything is on disk or the time is over. Collective."""
        drained = Drained()
        self.cache.writing_check(write_back=True)
        before = self.store.counters.written
        nodes = deque(self._absent())
        absent = [node.hash_value for node in nodes]
        self._lock_host(nodes)
        allowed_pages = 0
        while nodes:
            node = nodes.popleft()
            is_in_memory = self.tree.contains(node) and (not node.evicted or node.backuped)
            if not true_on_all(self.cache, is_in_memory):
                continue  # evicted from some rank's host to make room
            node_pages = len(node.hash_value)
            if allowed_pages < node_pages:
                allowed_pages = self._pages_in_time(max(node_pages, BATCH_PAGES))
            if not allowed_pages:
                break
            if allowed_pages < node_pages:
                nodes.appendleft(node)
                node = self._head(node, allowed_pages)
            allowed_pages -= len(node.hash_value)
            self._write(node)
        while self._may_wait():
            self._wait()
        for node_id in list(self._locked):
            self._unlock(node_id)
        drained.pages = self.store.counters.written - before
        drained.lost_pages = sum(len(pages) - self.store.count_leading(pages) for pages in absent)
        drained.seconds = self._monotonic() - self._began
        return drained

    def _absent(self) -> list[UnifiedTreeNode]:
        """Return the nodes with pages that some rank's disk lacks, by depth, without KV of fused
        documents; no node if a rank has no disk."""
        if not true_on_all(self.cache, self.store.unavailable is None):
            return []
        nodes = [self.tree.root_node]
        for node in nodes:  # grows by the children
            nodes += reversed(node.children.values())
        nodes = [n for n in nodes if n.hash_value and not is_documents_key(n.key.extra_key)]
        whole = [self.store.count_leading(n.hash_value) == len(n.hash_value) for n in nodes]
        return [
            node for node, is_whole in zip(nodes, least_of_ranks(self.cache, whole)) if not is_whole
        ]

    def _pages_in_time(self, most_pages: int) -> int:
        """Return the number of pages, up to ``most_pages``, that every rank can write in time.

        At most an eighth of the host tier. Waits while enough pages are being written.
        """
        most_pages = min(most_pages, max(1, self._host_pages // 8))
        while True:
            self.cache.check_hicache_events()
            pages = least_of_ranks(self.cache, [self._own_pages_in_time(most_pages)])[0]
            if pages != _WAIT:
                return pages
            time.sleep(_WAIT_S)

    def _own_pages_in_time(self, most_pages: int) -> int:
        left_s = self._time_left_s()
        if left_s <= 0:
            return 0
        pending = sum(self._pages_of.get(n, 0) for n, _ in self.cache.ongoing_backup.values())
        written_pages = self._passed_on - pending
        if not written_pages:
            first_pages = max(1, FIRST_BYTES // self._page_bytes)
            return min(most_pages, first_pages) if pending < first_pages else _WAIT
        pages_s = written_pages / (self._monotonic() - self._began)
        if pending > pages_s:  # more than a second's work
            return _WAIT
        return min(most_pages, max(0, int(SAFETY * pages_s * left_s) - pending))

    def _write(self, node: UnifiedTreeNode) -> None:
        """Start to write ``node``, unless the host has no room for its copy."""
        cache = self.cache
        if node.backuped:
            self._write_copy(node)
            return
        while not true_on_all(
            self.cache, node.backuped or cache.backup_node_for_write_back(node.id)
        ):
            if self._may_wait():
                self._wait()
            elif self._locked and true_on_all(self.cache, self._time_left_s() > 0):
                self._write_copy(self.tree.node_by_id(next(reversed(self._locked))))
            else:
                return
        self._count(node)

    def _write_copy(self, node: UnifiedTreeNode) -> None:
        """Start to write the host copy of ``node``. The host may evict it once it is written."""
        self.cache.write_backup_storage(node.id)
        self._unlock(node.id)
        self._count(node)

    def _count(self, node: UnifiedTreeNode) -> None:
        self._pages_of[node.id] = len(node.hash_value)
        self._passed_on += len(node.hash_value)

    def _lock_host(self, nodes: Iterable[UnifiedTreeNode]) -> None:
        """Keep the nodes that only the host holds from making room for copies of the device's."""
        for node in nodes:
            if node.evicted:
                self._locked[node.id] = self.cache.inc_host_lock_ref(node.id).to_dec_params()

    def _unlock(self, node_id: int) -> None:
        lock = self._locked.pop(node_id, None)
        if lock is not None:
            self.cache.dec_host_lock_ref(node_id, lock)

    def _head(self, node: UnifiedTreeNode, pages: int) -> UnifiedTreeNode:
        """Split ``node`` after ``pages`` pages. Returns the part above."""
        head, action = self.tree._split_node(node.key, node, pages * self.tree.page_size)
        assert action is None, action  # no copy is pending
        return head

    def _may_wait(self) -> bool:
        """Return whether every rank writes and has time. Collective."""
        return true_on_all(self.cache, bool(self.cache.ongoing_backup) and self._time_left_s() > 0)

    def _wait(self) -> None:
        """Wait for writes, and release the host copies of completed writes."""
        self.cache.check_hicache_events()
        time.sleep(_WAIT_S)

    def _time_left_s(self) -> float:
        return self._ends - self._monotonic()
