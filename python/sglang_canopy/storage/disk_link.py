"""The tree's side of the disk tier: what it reports of its pages, and what it restores from them.

Runs on the scheduler thread; ``PAGES`` carries everything to and from the storage's own threads.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from sglang_canopy.disk.page import PageMeta
from sglang_canopy.radix.leaf import NodeLeaf, set_offsets
from sglang_canopy.radix.tree import Tree
from sglang_canopy.storage.agreement import first_ranks, runs_of
from sglang_canopy.storage.disk_retry import Attachment, DiskRetry
from sglang_canopy.storage.page_metadata import frozen_copy, metadata_of, pages_of, restore
from sglang_canopy.storage.page_table import PAGES

if TYPE_CHECKING:
    from sglang.srt.mem_cache.unified_cache.unified_tree_core import UnifiedTreeNode
    from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

    from sglang_canopy.radix.live_request import LiveRequest

REPORT_INTERVAL_S = 1.0
"""Uses of a node are reported to the disk tier at most once in so many seconds."""


class DiskLink:
    """``radix.disk_tier.DiskTier`` over ``PAGES``; does nothing while another backend is in use."""

    def __init__(self, tree: Tree) -> None:
        self.tree = tree
        self.attachment = Attachment()
        self.active = False
        """Whether the storage backend takes metadata; looked up at every arrival."""
        self.retry = DiskRetry(tree, self.attachment)
        self._backend: Any = None
        """The storage backend that the last request found."""
        self._unreported: dict[UnifiedTreeNode, None] = {}
        """Nodes used since their last report."""
        self._reported_at = float("-inf")

    def attach(self, cache: UnifiedRadixCache) -> None:
        self.attachment.cache = cache

    def request_arrived(self, epoch: float) -> None:
        """Report the uses since the last time, at most once in ``REPORT_INTERVAL_S``."""
        backend = self._ours()
        if backend is not None and backend is not self._backend:
            self.retry.attached()
        self._backend, self.active = backend, backend is not None
        self.attachment.epoch = epoch
        if self.active:
            self.retry.request_arrived()
        if not self._unreported:
            return
        now = self.tree.clock.now
        if not self.active:
            self._unreported.clear()
        elif now - self._reported_at >= REPORT_INTERVAL_S:
            self._reported_at = now
            for node in self._unreported:
                if self.tree.contains(node):
                    self._report(node)
            self._unreported.clear()

    def tree_reset(self) -> None:
        self._unreported.clear()
        self.retry.clear()

    def _ours(self) -> Any:
        """The storage backend, if it takes metadata with its pages."""
        controller = getattr(self.attachment.cache, "cache_controller", None)
        backend = getattr(controller, "storage_backend", None)
        return backend if getattr(backend, "pages", None) is PAGES else None

    def unwritten_ancestors(self, node: UnifiedTreeNode) -> list[UnifiedTreeNode]:
        """Nodes above ``node`` that the disk tier never got, shallowest first.

        Under ``write_back`` SGLang copies down what it evicts, tails before heads; the disk tier
        keeps no page without its prefix. So the prefix is copied along, once. Its copies on the
        host are the first to go when room is needed there.
        """
        pool = self.attachment.cache.cache_controller.mem_pool_host  # type: ignore[union-attr]
        room = pool.size // 2 - len(node.key)
        above: list[UnifiedTreeNode] = []
        node = node.parent
        while node is not self.tree.root_node and not self.retry.is_written(node.canopy):
            room -= len(node.key)
            if room < 0 or node.backuped or node.evicted:
                break
            above.append(node)
            node = node.parent
        return above[::-1]

    def before_write(self, node: UnifiedTreeNode) -> None:
        if not self.active or not node.hash_value:
            return
        if node.canopy.reported_at > float("-inf"):
            self._unreported.pop(node, None)  # its request is done: nothing to add later
        self.retry.write_prefix(node)
        self._describe(node)

    def before_staged_write(self, node: UnifiedTreeNode) -> None:
        if self.active and node.hash_value and not self.retry.is_written(node.canopy):
            self._describe(node)

    def node_used(self, node: UnifiedTreeNode) -> None:
        """A finished request used ``node``: the copy on disk is to stay as fresh as this one."""
        leaf = node.canopy
        if not node.hash_value:
            return
        self.retry.node_used(node, self._ours())
        if self.tree.clock.now - leaf.reported_at >= REPORT_INTERVAL_S:
            self._report(node)
            if leaf.hits > 1:
                return
        # In use all the time; or new, and perhaps not written yet: (again) a little later.
        self._unreported[node] = None

    def request_finished(self, request: LiveRequest) -> None:
        """Let the disk tier's policy learn from a request that is done."""
        if self.active and self.tree.live.disk_learns:
            blocks = request.prompt_tokens // request.block_tokens
            epoch = self.attachment.epoch
            PAGES.add_request("arrive", frozen_copy(request, blocks, epoch))
            PAGES.add_request("finish", frozen_copy(request, len(request.path), epoch))

    def pages_read(self, node_id: int | None, hashes: Sequence[str]) -> None:
        """A node made for the pages gets their metadata, and is split where that differs."""
        if not self.active:
            return
        metas = self._agreed(PAGES.take_read(hashes))
        if node_id is None:
            return
        tree, node = self.tree, self.tree.node_by_id(node_id)
        if node.canopy.hits or not node.hash_value:
            return
        set_offsets(node)
        runs = runs_of(metas[-len(node.hash_value) :])
        for pages, meta in runs[:-1]:
            head, action = tree._split_node(node.key, node, pages * tree.page_size)
            assert action is None, action  # nothing is copied from a node that was just read
            self._restore(head.canopy, meta)
        self._restore(node.canopy, runs[-1][1])

    # ---- to and from the page table ----

    def _describe(self, node: UnifiedTreeNode) -> None:
        """``node`` is about to be written: pass on its pages' metadata."""
        keys, leaf = node.hash_value, node.canopy
        set_offsets(node)
        self.retry.mark_written(leaf)
        metas = pages_of(leaf, len(keys), self.tree.page_size, self.attachment.epoch)
        PAGES.describe(keys, metas, [node.parent.get_last_hash_value(), *keys[:-1]])

    def _report(self, node: UnifiedTreeNode) -> None:
        """Pass on that ``node`` was used."""
        keys = node.hash_value
        if not keys:
            return
        node.canopy.reported_at = self.tree.clock.now
        if PAGES.description(keys[0]) is not None:
            self._describe(node)  # not written yet: it is to be written as it is now
        PAGES.add_use(keys, metadata_of(node.canopy, self.attachment.epoch))

    def _restore(self, leaf: NodeLeaf, meta: PageMeta | None) -> None:
        # Without metadata, it takes its parent's when the policy hears of it.
        if meta is not None and meta.hits >= 1:
            keep_until = restore(leaf, meta, self.tree.clock.now, self.attachment.epoch)
            if keep_until is not None:
                self.tree.protected.keep(leaf.node, keep_until, leaf.tenant)
        self.retry.mark_read(leaf)

    def _agreed(self, metas: list[PageMeta | None]) -> list[PageMeta | None]:
        """What every rank is to use of its records: the first rank's, and differences counted.

        Pipeline stages do without: they act on one read at different times, and cannot stop to
        compare.
        """
        cache = self.attachment.cache
        if cache is None:
            return metas
        if cache.pp_size > 1:
            return [None] * len(metas)
        if cache.tp_world_size <= 1:
            return metas
        metas, agreed = first_ranks(metas, cache)
        self.tree.live.counters.records_compared += 1
        self.tree.live.counters.records_disagreed += not agreed
        return metas
