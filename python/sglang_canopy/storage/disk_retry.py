"""Pages that the disk tier refused, lost or was never offered are written when they are used.

SGLang offers each node to the storage once, when its host copy is made. The disk tier refuses a
page while it is full or broken, and every page whose prefix it does not have. So one refusal, or a
storage attached to a running server, would keep all pages below a prompt off the disk for as long
as the prompt is in memory.

Which pages a disk lacks differs by rank, and what is written must not: each write holds host
memory until all ranks have acknowledged it. So the ranks agree now and then that something was
refused, anywhere. That begins a new *round*: a node of an earlier round is written again,
prefixes first, once a request has used it. The disk passes over what it has.

A store that counts a page's time from its last write (Mooncake) is written to again as well: a
node that is used when half of that time is over, within a budget of bytes a second.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from sglang_canopy.radix.leaf import NodeLeaf, set_offsets
from sglang_canopy.radix.tree import Tree
from sglang_canopy.storage.page_metadata import metadata_of
from sglang_canopy.storage.page_table import PAGES

if TYPE_CHECKING:
    from sglang.srt.mem_cache.unified_cache.unified_tree_core import UnifiedTreeNode
    from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

ROUND_S = 30.0
"""A new round begins at most once in so many seconds; an idle healthy disk costs one look."""
MAX_PAGES_A_REQUEST = 256
"""Pages rewritten for one arriving request; but always one node."""
MAX_WRITES = 64
"""Writes on their way to the disk, of any kind, above which nothing is written again."""
RENEW_BYTES_S = 32 << 20
"""Bytes a second, on average over ten seconds, that are written again only to stay longer."""
MAX_WAITING = 4096
"""Nodes that wait to be written again. More are left to their next use."""


@dataclass(slots=True)
class Attachment:
    """The cache that tree and disk tier belong to, and the difference between their clocks."""

    cache: UnifiedRadixCache | None = None
    """Known once the cache exists."""
    epoch: float = 0.0
    """Seconds since 1970 when the requests' clock was 0."""


class DiskRetry:
    """Runs on the scheduler's thread, between the tree's own operations."""

    def __init__(self, tree: Tree, attachment: Attachment) -> None:
        self.tree = tree
        self.attachment = attachment
        self.round = 0
        self._attached_in_round = 0
        """First round of the storage in use. Earlier rounds wrote to another one."""
        self._round_began_at = float("-inf")
        self._waiting: dict[UnifiedTreeNode, bool] = {}
        """Nodes to write again; true for those that the store has, to renew their time."""
        self._credit_bytes = 10.0 * RENEW_BYTES_S
        self._credited_at = 0.0

    def attached(self) -> None:
        """Another storage is in use: no node has been offered to it."""
        self.round += 1
        self._attached_in_round = self.round
        self._waiting.clear()

    def is_written(self, leaf: NodeLeaf) -> bool:
        """Whether the disk tier has these pages, as far as is known."""
        return leaf.on_disk and leaf.disk_round == self.round

    def mark_written(self, leaf: NodeLeaf) -> None:
        """These pages are being written now."""
        leaf.on_disk, leaf.disk_round = True, self.round
        leaf.disk_written_at = self.tree.clock.now

    def mark_read(self, leaf: NodeLeaf) -> None:
        """These pages came from the store; when they were written is not known."""
        leaf.on_disk, leaf.disk_round = True, self.round
        leaf.disk_written_at = float("-inf")

    def node_used(self, node: UnifiedTreeNode, backend: Any) -> None:
        """A finished request used ``node``. ``backend``: that which stores its pages."""
        if len(self._waiting) >= MAX_WAITING:
            return
        if self._lacks_write(node):
            self._waiting[node] = False
        elif self._needs_renewal(node, backend):
            self._waiting[node] = True

    def request_arrived(self) -> None:
        """A request came in: begin a round if it is time, and write some of what waits."""
        now = self.tree.clock.now
        if now - self._round_began_at >= ROUND_S:
            self._round_began_at = now
            self.round += self._any_rank_refused(PAGES.take_refusal())
        burst = 10.0 * RENEW_BYTES_S
        earned = RENEW_BYTES_S * (now - self._credited_at)
        self._credit_bytes = min(burst, self._credit_bytes + earned)
        self._credited_at = now
        if self._waiting:
            self._rewrite_some()

    def write_prefix(self, node: UnifiedTreeNode) -> None:
        """Write host copies above ``node`` that the storage in use was never offered.

        Shallowest first, so that the write of ``node``, which follows, has its prefix.
        """
        cache = self.attachment.cache
        assert cache is not None
        above: list[UnifiedTreeNode] = []
        node = node.parent
        while node is not self.tree.root_node and not self._offered(node.canopy):
            above.append(node)
            node = node.parent
        for node in reversed(above):
            if not node.backuped or node.write_through_pending_id is not None:
                return
            cache.write_backup_storage(node.id)

    def clear(self) -> None:
        self._waiting.clear()

    def _offered(self, leaf: NodeLeaf) -> bool:
        """Whether the storage in use was offered these pages, or gave them."""
        return leaf.on_disk and leaf.disk_round >= self._attached_in_round

    def _lacks_write(self, node: UnifiedTreeNode) -> bool:
        """Whether no write of this round covers the node, and SGLang will not start one."""
        if not node.canopy.on_disk:
            return bool(node.backuped)
        return node.canopy.disk_round < self.round

    def _needs_renewal(self, node: UnifiedTreeNode, backend: Any) -> bool:
        """Whether half of the time is over for which the store keeps these pages."""
        if not hasattr(backend, "pinned_s") or not node.canopy.on_disk:
            return False
        set_offsets(node)
        now, epoch = self.tree.clock.now, self.attachment.epoch
        pinned_s = backend.pinned_s(metadata_of(node.canopy, epoch), now + epoch)
        return pinned_s > 0 and now - node.canopy.disk_written_at >= pinned_s / 2

    def _any_rank_refused(self, refused: bool) -> bool:
        """Whether any rank was refused something. Pipeline stages cannot stop to compare."""
        cache = self.attachment.cache
        if cache is None or cache.pp_size > 1:
            return False
        if cache.tp_world_size > 1:
            seen = torch.tensor([int(refused)], dtype=torch.int64)
            cache._all_reduce(seen, torch.distributed.ReduceOp.MAX)
            refused = bool(seen.item())
        return refused

    def _rewrite_some(self) -> None:
        cache = self.attachment.cache
        assert cache is not None
        live = [n for n in self._waiting if self.tree.contains(n) and n.hash_value]
        for node in live:
            set_offsets(node)
        live.sort(key=lambda node: node.canopy.offset)
        token_bytes = cache.cache_controller.mem_pool_host.size_per_token
        pages, done = 0, 0
        for node in live:
            pages += len(node.hash_value)
            if (done and pages > MAX_PAGES_A_REQUEST) or len(cache.ongoing_backup) >= MAX_WRITES:
                break
            done += 1
            if self._waiting[node]:
                if self._credit_bytes <= 0:
                    continue  # at its next use
                self._credit_bytes -= len(node.key) * token_bytes
                PAGES.mark_rewrite(node.hash_value)
            self._write(node)
        self._waiting = {node: self._waiting[node] for node in live[done:]}

    def _write(self, node: UnifiedTreeNode) -> None:
        """From the host's copy; where that is gone, by making one first."""
        cache = self.attachment.cache
        assert cache is not None
        if node.write_through_pending_id is not None:
            return  # its copy to the host is on the way, and the write follows
        if node.backuped:
            cache.write_backup_storage(node.id)
        elif not node.evicted and cache.cache_controller.write_policy != "write_back":
            cache._apply_cache_action(self.tree.build_backup_kv_action(node.id))
