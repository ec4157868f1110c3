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
from sglang_canopy.ranks import all_over_ranks, min_over_ranks
from sglang_canopy.tenant import is_documents_key

if TYPE_CHECKING:
    from sglang.srt.mem_cache.base_prefix_cache import DecLockRefParams
    from sglang.srt.mem_cache.unified_cache.unified_tree_core import UnifiedTreeNode
    from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

logger = logging.getLogger(__name__)

UNMEASURED_BYTES = 32 << 20
"""Bytes written before the speed is measured."""
BATCH_PAGES = 64
"""Pages of small nodes between two agreements."""
RELIED_SHARE = 0.8
"""Share of the measured speed that is relied on."""
_POLL_S = 0.002
_WAIT_FOR_WRITES = -1
"""In place of a number of pages: wait for pending writes."""


@dataclass(slots=True)
class DrainResult:
    written_pages: int = 0
    """Pages written by this rank."""
    lost_pages: int = 0
    """Pages that only memory holds: time ran out, or the disk tier refused them."""
    duration_s: float = 0.0


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
        self._began_at = monotonic()
        self._ends_at = self._began_at + seconds
        pool = cache.cache_controller.mem_pool_host
        self._page_bytes = int(pool.size_per_token) * tree.page_size
        self._host_pages = int(pool.size) // tree.page_size
        self._passed_pages: dict[int, int] = {}
        """Pages passed to SGLang's storage threads, by node."""
        self._total_passed_pages = 0
        self._locks: dict[int, DecLockRefParams] = {}
        """Locks of unwritten nodes that only the host holds, by depth in the tree."""

    def run(self) -> DrainResult:
        """Write until everything is on disk or the time is over. Collective."""
        result = DrainResult()
        self.cache.writing_check(write_back=True)
        written_before = self.store.counters.written_pages
        nodes = deque(self._find_absent())
        absent_keys = [node.hash_value for node in nodes]
        self._lock_host(nodes)
        allowed_pages = 0
        while nodes:
            node = nodes.popleft()
            is_in_memory = self.tree.contains(node) and (not node.evicted or node.backuped)
            if not all_over_ranks(self.cache, is_in_memory):
                continue  # evicted from some rank's host to make room
            node_pages = len(node.hash_value)
            if allowed_pages < node_pages:
                allowed_pages = self._agree_pages_in_time(max(node_pages, BATCH_PAGES))
            if not allowed_pages:
                break
            if allowed_pages < node_pages:
                nodes.appendleft(node)
                node = self._split_head(node, allowed_pages)
            allowed_pages -= len(node.hash_value)
            self._write(node)
        while self._may_wait():
            self._wait()
        for node_id in list(self._locks):
            self._unlock(node_id)
        result.written_pages = self.store.counters.written_pages - written_before
        result.lost_pages = sum(len(keys) - self.store.count_leading(keys) for keys in absent_keys)
        result.duration_s = self._monotonic() - self._began_at
        return result

    def _find_absent(self) -> list[UnifiedTreeNode]:
        """Return the nodes with pages that some rank's disk lacks, by depth, without KV of fused
        documents; no node if a rank has no disk."""
        if not all_over_ranks(self.cache, self.store.unavailable is None):
            return []
        nodes = [self.tree.root_node]
        for node in nodes:  # grows by the children
            nodes += reversed(node.children.values())
        nodes = [n for n in nodes if n.hash_value and not is_documents_key(n.key.extra_key)]
        is_whole_here = [self.store.count_leading(n.hash_value) == len(n.hash_value) for n in nodes]
        return [
            node
            for node, is_whole in zip(nodes, min_over_ranks(self.cache, is_whole_here))
            if not is_whole
        ]

    def _agree_pages_in_time(self, max_pages: int) -> int:
        """Return the number of pages, up to ``max_pages``, that every rank can write in time. At most
        an eighth of the host tier. Waits while enough pages are being written."""
        max_pages = min(max_pages, max(1, self._host_pages // 8))
        while True:
            self.cache.check_hicache_events()
            pages = min_over_ranks(self.cache, [self._own_pages_in_time(max_pages)])[0]
            if pages != _WAIT_FOR_WRITES:
                return pages
            time.sleep(_POLL_S)

    def _own_pages_in_time(self, max_pages: int) -> int:
        left_s = self._time_left_s()
        if left_s <= 0:
            return 0
        writes = self.cache.ongoing_backup.values()
        pending_pages = sum(self._passed_pages.get(node_id, 0) for node_id, _ in writes)
        written_pages = self._total_passed_pages - pending_pages
        if not written_pages:
            first_pages = max(1, UNMEASURED_BYTES // self._page_bytes)
            return min(max_pages, first_pages) if pending_pages < first_pages else _WAIT_FOR_WRITES
        pages_per_s = written_pages / (self._monotonic() - self._began_at)
        if pending_pages > pages_per_s:  # more than a second's work
            return _WAIT_FOR_WRITES
        return min(max_pages, max(0, int(RELIED_SHARE * pages_per_s * left_s) - pending_pages))

    def _write(self, node: UnifiedTreeNode) -> None:
        """Start to write ``node``, unless the host has no room for its copy."""
        cache = self.cache
        if node.backuped:
            self._write_copy(node)
            return
        while not all_over_ranks(
            self.cache, node.backuped or cache.backup_node_for_write_back(node.id)
        ):
            if self._may_wait():
                self._wait()
            elif self._locks and all_over_ranks(self.cache, self._time_left_s() > 0):
                self._write_copy(self.tree.node_by_id(next(reversed(self._locks))))
            else:
                return
        self._count_passed(node)

    def _write_copy(self, node: UnifiedTreeNode) -> None:
        """Start to write the host copy of ``node``. The host may evict it once it is written."""
        self.cache.write_backup_storage(node.id)
        self._unlock(node.id)
        self._count_passed(node)

    def _count_passed(self, node: UnifiedTreeNode) -> None:
        self._passed_pages[node.id] = len(node.hash_value)
        self._total_passed_pages += len(node.hash_value)

    def _lock_host(self, nodes: Iterable[UnifiedTreeNode]) -> None:
        """Keep the nodes that only the host holds from making room for copies of the device's."""
        for node in nodes:
            if node.evicted:
                self._locks[node.id] = self.cache.inc_host_lock_ref(node.id).to_dec_params()

    def _unlock(self, node_id: int) -> None:
        lock = self._locks.pop(node_id, None)
        if lock is not None:
            self.cache.dec_host_lock_ref(node_id, lock)

    def _split_head(self, node: UnifiedTreeNode, pages: int) -> UnifiedTreeNode:
        """Split ``node`` after ``pages`` pages. Returns the part above."""
        head, action = self.tree._split_node(node.key, node, pages * self.tree.page_size)
        assert action is None, action  # no copy is pending
        return head

    def _may_wait(self) -> bool:
        """Return whether every rank writes and has time. Collective."""
        return all_over_ranks(
            self.cache, bool(self.cache.ongoing_backup) and self._time_left_s() > 0
        )

    def _wait(self) -> None:
        """Wait for writes, and release the host copies of completed writes."""
        self.cache.check_hicache_events()
        time.sleep(_POLL_S)

    def _time_left_s(self) -> float:
        return self._ends_at - self._monotonic()
