"""The tree's side of the disk tier: report metadata of pages, and restore it from pages read.

Runs on the scheduler thread. ``PAGES`` exchanges the data with the storage threads.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from sglang_canopy.disk.page import PageMeta
from sglang_canopy.disk.store import DiskStore
from sglang_canopy.radix.disk_tier import DiskTier
from sglang_canopy.radix.live_request import NodeLeaf, set_offsets
from sglang_canopy.radix.tree import Tree
from sglang_canopy.storage.disk_retry import Attachment, DiskRetry
from sglang_canopy.storage.drain import Drain
from sglang_canopy.storage.page_metadata import (
    frozen_copy,
    metadata_of,
    page_metas,
    restore_leaf,
    runs_of,
    take_first_ranks,
)
from sglang_canopy.storage.page_table import PAGES

if TYPE_CHECKING:
    from sglang.srt.mem_cache.unified_cache.unified_tree_core import UnifiedTreeNode
    from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

    from sglang_canopy.radix.live_request import LiveRequest

logger = logging.getLogger(__name__)

REPORT_INTERVAL_S = 1.0
"""Minimum seconds between two reports of one node's uses."""


class DiskLink(DiskTier):
    """The disk tier over ``PAGES``; inactive with other storage backends."""

    tree: Tree

    def __init__(self, tree: Tree) -> None:
        super().__init__(tree)
        self.attachment = Attachment()
        self.retry = DiskRetry(tree, self.attachment)
        self._drain_ends_at: float | None = None
        self._backend: Any = None
        """Storage backend at the last arrival."""
        self._unreported: dict[UnifiedTreeNode, None] = {}
        """Nodes used since their last report."""
        self.on_next_round: Callable[[], None] | None = None
        """Called once, at the next round. Collective."""
        self._reported_at = float("-inf")

    def attach(self, cache: UnifiedRadixCache) -> None:
        self.attachment.cache = cache

    def record_arrival(self, epoch: float) -> None:
        """Report uses, at most every ``REPORT_INTERVAL_S``, and detect a new storage backend."""
        backend = self._our_backend()
        if backend is not None and backend is not self._backend:
            self.retry.start_round()
        self._backend, self.active = backend, backend is not None
        self.attachment.epoch = epoch
        if self.active and self.retry.record_arrival():
            if self.suspended:
                self._try_to_resume()
            elif (call := self.on_next_round) is not None:
                self.on_next_round = None
                call()
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

    def record_reset(self) -> None:
        self._unreported.clear()
        self.retry.clear()

    @property
    def store(self) -> DiskStore | None:
        """This rank's disk store, or ``None`` with another storage backend."""
        store = getattr(self._our_backend(), "store", None)
        return store if isinstance(store, DiskStore) else None

    def begin_drain(self, seconds: float) -> None:
        self._drain_ends_at = time.monotonic() + seconds

    def time_left_s(self, seconds: float) -> float:
        """Return the seconds left of a drain of ``seconds``; negative if its time is over."""
        return seconds if self._drain_ends_at is None else self._drain_ends_at - time.monotonic()

    def drain(self, seconds: float) -> None:
        """Write what only memory holds; then close the store, since the host's memory ends with the
        storage threads still running."""
        cache, backend, store = self.attachment.cache, self._our_backend(), self.store
        self._save_learnt()
        if cache is None or store is None:
            return
        self.active = True
        if seconds > 0 and cache.pp_size == 1 and cache.host_memory_mode != "buffer_only":
            try:  # collective: a rank whose time is over takes part too
                result = Drain(self.tree, cache, store, self.time_left_s(seconds)).run()
                logger.info(
                    "Canopy disk tier: drained %d pages in %.1f s; %d pages are lost.",
                    result.written_pages,
                    result.duration_s,
                    result.lost_pages,
                )
            except Exception:  # the pages written so far are usable
                logger.exception("Canopy disk tier: the drain failed")
        backend.close()
        cache.shutdown()

    def _save_learnt(self) -> None:
        live = self.tree.live
        if live.profile is None:
            return
        try:
            live.profile.save(live.learner)
        except Exception:
            logger.exception("Canopy: the learnt state could not be saved")

    def _our_backend(self) -> Any:
        """Return the storage backend, or ``None`` if it does not accept metadata."""
        controller = getattr(self.attachment.cache, "cache_controller", None)
        if controller is None:
            return None
        backend = getattr(controller, "storage_backend", None)
        return backend if getattr(backend, "pages", None) is PAGES else None

    def unwritten_ancestors(self, node: UnifiedTreeNode) -> list[UnifiedTreeNode]:
        """Return ancestors of ``node`` that were never written to the disk tier, shallowest first.

        Under ``write_back`` SGLang copies evicted nodes down, leaves first, but the disk tier needs the
        prefix of every page. The prefix is therefore copied too, once. Its host copies are evicted first.
        """
        pool = self.attachment.cache.cache_controller.mem_pool_host  # type: ignore[union-attr]
        room_tokens = pool.size // 2 - len(node.key)
        ancestors: list[UnifiedTreeNode] = []
        node = node.parent
        while node is not self.tree.root_node and not self.retry.is_written(node.canopy):
            room_tokens -= len(node.key)
            if room_tokens < 0 or node.backuped or node.evicted:
                break
            ancestors.append(node)
            node = node.parent
        return ancestors[::-1]

    def finish_copies(self) -> None:
        """Finish the copies that ``unwritten_ancestors`` began, if the leaf's own found no room."""
        cache = self.attachment.cache
        if self.active and cache is not None and cache.ongoing_write_through:
            cache.writing_check(write_back=cache.tree_core.is_write_back)

    def suspend(self, reason: str) -> bool:
        """Stop using the store; see ``DiskTier.suspend``. All ranks call this together."""
        current = getattr(self._our_backend(), "current", None)
        if current is None:
            return False
        self.suspended = True
        return current.suspend(reason)

    def _try_to_resume(self) -> None:
        """Use a suspended store again once its writes have ended and its folder is open."""
        cache, current = self.attachment.cache, getattr(self._our_backend(), "current", None)
        if cache is None or current is None or cache.ongoing_backup:
            return
        current.resume()
        self.suspended = self.retry.on_any_rank(current.store.unavailable is not None)

    def holds(self, page: str) -> bool:
        store = self.store
        return store is not None and store.count_leading([page]) == 1

    def before_write(self, node: UnifiedTreeNode) -> None:
        if not self.active or not node.hash_value:
            return
        if node.canopy.reported_at > float("-inf"):
            self._unreported.pop(node, None)  # the request has finished: no later report is needed
        self.retry.write_prefix(node)
        self.retry.mark_written(node.canopy)
        self._describe(node)

    def before_staged_write(self, node: UnifiedTreeNode) -> None:
        if self.active and node.hash_value and not self.retry.is_written(node.canopy):
            self.retry.mark_written(node.canopy)
            self._describe(node)

    def record_node_use(self, node: UnifiedTreeNode) -> None:
        """Report that a finished request used ``node``, so that the disk copy's metadata is current."""
        leaf = node.canopy
        if not node.hash_value:
            return
        self.retry.record_node_use(node, self._our_backend())
        if self.tree.clock.now - leaf.reported_at >= REPORT_INTERVAL_S:
            self._report(node)
            if leaf.hits > 1:
                return
        # Report later: the node was reported just now, or is new and may not be written yet.
        self._unreported[node] = None

    def record_finish(self, request: LiveRequest) -> None:
        """Pass a finished request to the disk tier's policy."""
        if self.active and self.tree.live.does_disk_learn:
            blocks = request.prompt_tokens // request.block_tokens
            epoch = self.attachment.epoch
            PAGES.add_request("arrive", frozen_copy(request, blocks, epoch))
            PAGES.add_request("finish", frozen_copy(request, len(request.path), epoch))

    def record_pages_read(self, node_id: int | None, hashes: Sequence[str]) -> None:
        """Restore the metadata of the node created for these pages; split it between differing runs."""
        if not self.active:
            return
        metas = self._agree_on(PAGES.take_read(hashes))
        if node_id is None:
            return
        tree, node = self.tree, self.tree.node_by_id(node_id)
        if node.canopy.hits or not node.hash_value:
            return
        set_offsets(node)
        runs = runs_of(metas[-len(node.hash_value) :])
        for pages, meta in runs[:-1]:
            head, action = tree._split_node(node.key, node, pages * tree.page_size)
            assert action is None, action  # a node that was just read has no pending copy
            self._restore(head.canopy, meta)
        self._restore(node.canopy, runs[-1].meta)

    # ---- to and from the page table ----

    def _describe(self, node: UnifiedTreeNode) -> None:
        """Put the metadata of the pages of ``node``, which is being written, into ``PAGES``."""
        keys, leaf = node.hash_value, node.canopy
        set_offsets(node)
        metas = page_metas(leaf, len(keys), self.tree.page_size, self.attachment.epoch)
        PAGES.describe(keys, metas, [node.parent.get_last_hash_value(), *keys[:-1]])

    def _report(self, node: UnifiedTreeNode) -> None:
        """Put a use of ``node`` into ``PAGES``."""
        keys = node.hash_value
        if not keys:
            return
        node.canopy.reported_at = self.tree.clock.now
        if PAGES.description(keys[0]) is not None:
            self._describe(node)  # not written yet: update the pending description
        PAGES.add_use(keys, metadata_of(node.canopy, self.attachment.epoch))

    def _restore(self, leaf: NodeLeaf, meta: PageMeta | None) -> None:
        # A leaf without metadata inherits its parent's on admission to the policy.
        if meta is not None and meta.hits >= 1:
            restore_leaf(leaf, meta, self.tree.clock.now, self.attachment.epoch)
        self.retry.mark_read(leaf)

    def _agree_on(self, metas: list[PageMeta | None]) -> list[PageMeta | None]:
        """Return the records that all ranks use (the first rank's), and count disagreements. With
        pipeline parallelism no records are used: stages handle one read at different times and cannot
        synchronise."""
        cache = self.attachment.cache
        if cache is None:
            return metas
        if cache.pp_size > 1:
            return [None] * len(metas)
        if cache.tp_world_size <= 1:
            return metas
        metas, do_agree = take_first_ranks(metas, cache)
        self.tree.live.counters.records_compared += 1
        self.tree.live.counters.records_disagreed += not do_agree
        return metas
