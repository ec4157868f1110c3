"""Retry of writes: pages that the disk tier refused, lost or was never offered are written on use.

SGLang offers each node to the storage once, when its host copy is made. The disk tier refuses pages
while it is full or broken, and pages without their prefix. One refusal, or a storage attached to a
running server, would therefore keep all pages below a prompt off the disk while the prompt is in memory.

The missing pages differ between ranks, but the writes must not: a write holds host memory until all
ranks have acknowledged it. The ranks therefore agree periodically whether any of them was refused. If
so, a new *round* begins: nodes of earlier rounds are written again when a request uses them, prefixes
first. The disk tier skips pages that it has.

If the store counts a page's lifetime from its last write (Mooncake), a node used after half of that
lifetime is written again, within a budget of bytes per second.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sglang_canopy.radix.live_request import NodeLeaf, set_offsets
from sglang_canopy.radix.tree import Tree
from sglang_canopy.ranks import all_over_ranks
from sglang_canopy.storage.page_metadata import metadata_of
from sglang_canopy.storage.page_table import PAGES

if TYPE_CHECKING:
    from sglang.srt.mem_cache.unified_cache.unified_tree_core import UnifiedTreeNode
    from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

MIN_ROUND_S = 30.0
"""Minimum seconds between two rounds."""
MAX_PAGES_PER_REQUEST = 256
"""Maximum pages rewritten per arriving request, except that one node always fits."""
MAX_PENDING_WRITES = 64
"""Maximum pending writes of any kind; at this number rewrites stop."""
RENEWAL_BYTES_PER_S = 32 << 20
"""Maximum bytes per second for renewals, averaged over ten seconds."""
MAX_WAITING_NODES = 4096
"""Maximum nodes waiting for a rewrite. Others are considered at their next use."""


@dataclass(slots=True)
class Attachment:
    """Cache of the tree and the disk tier, and the difference between their clocks."""

    cache: UnifiedRadixCache | None = None
    """Set after the cache is created."""
    epoch: float = 0.0
    """Unix time at zero of the requests' clock, in seconds."""


class DiskRetry:
    """Write missing pages again. Runs on the scheduler thread, between operations of the tree."""

    def __init__(self, tree: Tree, attachment: Attachment) -> None:
        self.tree = tree
        self.attachment = attachment
        self.round = 0
        self._attached_in_round = 0
        """First round of the current storage."""
        self._round_began_at = float("-inf")
        self._waiting: dict[UnifiedTreeNode, bool] = {}
        """Nodes to write again -> whether only to renew their lifetime."""
        self._credit_bytes = 10.0 * RENEWAL_BYTES_PER_S
        self._credited_at = 0.0

    def start_round(self) -> None:
        """Start a round for a new storage, to which no node has been offered."""
        self.round += 1
        self._attached_in_round = self.round
        self._waiting.clear()

    def is_written(self, leaf: NodeLeaf) -> bool:
        """Return whether these pages were written in this round."""
        return leaf.is_on_disk and leaf.disk_round == self.round

    def mark_written(self, leaf: NodeLeaf) -> None:
        """Record that these pages are being written."""
        leaf.is_on_disk, leaf.disk_round = True, self.round
        leaf.disk_written_at = self.tree.clock.now

    def mark_read(self, leaf: NodeLeaf) -> None:
        """Record that these pages were read from the store; the time of writing is unknown."""
        leaf.is_on_disk, leaf.disk_round = True, self.round
        leaf.disk_written_at = float("-inf")

    def record_node_use(self, node: UnifiedTreeNode, backend: Any) -> None:
        """Queue ``node``, used by a finished request, if its pages need a rewrite on ``backend``."""
        if len(self._waiting) >= MAX_WAITING_NODES:
            return
        if self._lacks_write(node):
            self._waiting[node] = False
        elif self._needs_renewal(node, backend):
            self._waiting[node] = True

    def record_arrival(self) -> bool:
        """Write some of the waiting nodes. Return whether the ranks agree again now on the storage."""
        now = self.tree.clock.now
        is_due = now - self._round_began_at >= MIN_ROUND_S
        if is_due:
            self._round_began_at = now
            self.round += self.on_any_rank(PAGES.take_refusal())
        max_credit_bytes = 10.0 * RENEWAL_BYTES_PER_S
        earned_bytes = RENEWAL_BYTES_PER_S * (now - self._credited_at)
        self._credit_bytes = min(max_credit_bytes, self._credit_bytes + earned_bytes)
        self._credited_at = now
        if self._waiting:
            self._rewrite_some()
        return is_due

    def write_prefix(self, node: UnifiedTreeNode) -> None:
        """Write host copies of ancestors of ``node`` that the current storage was never offered. Write
        the shallowest first, so that the following write of ``node`` has its prefix."""
        cache = self.attachment.cache
        assert cache is not None
        ancestors: list[UnifiedTreeNode] = []
        node = node.parent
        while node is not self.tree.root_node and not self._was_offered(node.canopy):
            ancestors.append(node)
            node = node.parent
        for node in reversed(ancestors):
            if not node.backuped or node.write_through_pending_id is not None:
                return
            cache.write_backup_storage(node.id)

    def clear(self) -> None:
        self._waiting.clear()

    def _was_offered(self, leaf: NodeLeaf) -> bool:
        """Return whether these pages were written to or read from the current storage."""
        return leaf.is_on_disk and leaf.disk_round >= self._attached_in_round

    def _lacks_write(self, node: UnifiedTreeNode) -> bool:
        """Return whether the node has no write in this round and SGLang will not start one."""
        if not node.canopy.is_on_disk:
            return bool(node.backuped)
        return node.canopy.disk_round < self.round

    def _needs_renewal(self, node: UnifiedTreeNode, backend: Any) -> bool:
        """Return whether half of the pages' lifetime in the store is over."""
        if not hasattr(backend, "pinned_s") or not node.canopy.is_on_disk:
            return False
        set_offsets(node)
        now, epoch = self.tree.clock.now, self.attachment.epoch
        pinned_s = backend.pinned_s(metadata_of(node.canopy, epoch), now + epoch)
        return pinned_s > 0 and now - node.canopy.disk_written_at >= pinned_s / 2

    def on_any_rank(self, is_true: bool) -> bool:
        """Return whether ``is_true`` holds on any rank; false with pipeline stages, which cannot agree."""
        cache = self.attachment.cache
        if cache is None or cache.pp_size > 1:
            return False
        return not all_over_ranks(cache, not is_true)

    def _rewrite_some(self) -> None:
        cache = self.attachment.cache
        assert cache is not None
        present = [n for n in self._waiting if self.tree.contains(n) and n.hash_value]
        for node in present:
            set_offsets(node)
        present.sort(key=lambda node: node.canopy.offset)
        token_bytes = cache.cache_controller.mem_pool_host.size_per_token
        pages, written_nodes = 0, 0
        for node in present:
            pages += len(node.hash_value)
            if (written_nodes and pages > MAX_PAGES_PER_REQUEST) or len(
                cache.ongoing_backup
            ) >= MAX_PENDING_WRITES:
                break
            written_nodes += 1
            if self._waiting[node]:
                if self._credit_bytes <= 0:
                    continue  # retry at the next use
                self._credit_bytes -= len(node.key) * token_bytes
                PAGES.mark_rewrite(node.hash_value)
            self._write(node)
        self._waiting = {node: self._waiting[node] for node in present[written_nodes:]}

    def _write(self, node: UnifiedTreeNode) -> None:
        """Write the host copy of ``node``; if it is evicted, make one first."""
        cache = self.attachment.cache
        assert cache is not None
        if node.write_through_pending_id is not None:
            return  # the copy to the host is pending, and the write follows it
        if node.backuped:
            cache.write_backup_storage(node.id)
        elif not node.evicted and cache.cache_controller.write_policy != "write_back":
            cache._apply_cache_action(self.tree.build_backup_kv_action(node.id))
