"""Reads and writes of the storage that prevent the eviction of KV counted as evictable.

SGLang counts a device token as evictable while no request uses it. Under ``write_back`` with a full host
it still evicts no node without a host copy if the storage reads behind that node, or reads or writes
below it (``UnifiedTreeCore.drop_subtree_no_host``). An allocation of the counted tokens would then fail.
"""

from __future__ import annotations

import logging
import math
import time
from typing import TYPE_CHECKING, Any

from sglang_canopy.ranks import all_over_ranks

if TYPE_CHECKING:
    from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

logger = logging.getLogger(__name__)

MAX_WAIT_S = 5.0
"""Maximum seconds per eviction that the scheduler waits for writes."""
_POLL_S = 0.001


class StorageHolds:
    """Ends the reads and writes at or below the leaves that an eviction walk has left over. All
    ranks decide alike: reads and writes have the same order on each, and a timeout on one rank is a
    timeout on all. With pipeline stages, which cannot agree, nothing is ended."""

    def __init__(self, cache: UnifiedRadixCache) -> None:
        self.cache = cache
        self.reads_cancelled = 0
        self.wait_count = 0
        """Evictions that waited for writes."""
        self.wait_s = 0.0
        self.longest_wait_s = 0.0
        self.timeout_count = 0
        """Waits that ended after ``MAX_WAIT_S``."""
        self._wait_until = math.inf
        """End of the waits of this eviction, in seconds of ``time.monotonic``."""
        self._timed_out_writes: set[int] = set()
        """Writes whose wait timed out; while one is pending, there is no other wait."""

    @property
    def may_hold(self) -> bool:
        """Whether the cache is one whose evictions the storage can prevent."""
        cache = self.cache
        return (
            cache.enable_storage
            and cache.is_write_back
            and cache.host_memory_mode == "cache"
            and len(cache.tree_components) == 1
            and cache.pp_size == 1
        )

    def begin_eviction(self) -> None:
        self._wait_until = math.inf

    def end_holds(self) -> bool:
        """Cancel the reads, or, if there are none, wait for the writes. Return whether a walk can free more.
        The requests of cancelled reads look up again or recompute, as SGLang does for a read that finds
        no room."""
        return self._cancel_reads() or self._finish_writes()

    def stats(self) -> dict[str, Any]:
        """Return the counters for ``/canopy/status``."""
        return {
            "reads_cancelled": self.reads_cancelled,
            "write_waits": self.wait_count,
            "write_wait_s": self.wait_s,
            "longest_write_wait_s": self.longest_wait_s,
            "write_timeouts": self.timeout_count,
        }

    def _cancel_reads(self) -> bool:
        cache = self.cache
        request_ids = [
            request_id
            for request_id, read in cache.ongoing_prefetch.items()
            if read.anchor_lock_params is not None and self._holds_leaf(read.anchor_node_id)
        ]
        for request_id in request_ids:
            cache.release_aborted_request(request_id)
        self.reads_cancelled += len(request_ids)
        return bool(request_ids)

    def _finish_writes(self) -> bool:
        cache = self.cache
        ongoing = cache.ongoing_backup.items()
        write_ids = {write_id for write_id, (node_id, _) in ongoing if self._holds_leaf(node_id)}
        if not write_ids or not self._timed_out_writes.isdisjoint(cache.ongoing_backup):
            return False
        began_at = time.monotonic()
        self._wait_until = min(self._wait_until, began_at + MAX_WAIT_S)
        queue = cache.cache_controller.ack_backup_queue
        while not write_ids.isdisjoint(cache.ongoing_backup):
            while not queue.qsize() and time.monotonic() < self._wait_until:
                time.sleep(_POLL_S)
            if not all_over_ranks(cache, queue.qsize() > 0):
                break
            # One at a time, so that all ranks process the same writes.
            cache._drain_storage_control_queues_impl(0, 0, 1, 0, {}, log_metrics=True)
        waited_s = time.monotonic() - began_at
        self.wait_count += 1
        self.wait_s += waited_s
        self.longest_wait_s = max(self.longest_wait_s, waited_s)
        if write_ids.isdisjoint(cache.ongoing_backup):
            return True
        self.timeout_count += 1
        self._timed_out_writes = write_ids
        return self._suspend_tier()

    def _suspend_tier(self) -> bool:
        """Stop using a storage that does not respond. Return whether its writes lock no KV now."""
        cache = self.cache
        for request_id in list(cache.ongoing_prefetch):
            cache.release_aborted_request(request_id)
        reason = f"a write has not ended after {MAX_WAIT_S:g} s"
        if not all_over_ranks(cache, cache.tree_core.disk.suspend(reason)):
            logger.warning("Canopy: %s; the KV above it stays on the device", reason)
            return False
        logger.warning("Canopy disk tier: %s", reason)
        # A suspended tier keeps no page of these writes, so their host memory may be used again.
        # Until their ends they lock the root, which is never evicted.
        root_id = cache.tree_core.root_node.id
        for write_id, (node_id, lock) in cache.ongoing_backup.items():
            cache.dec_host_lock_ref(node_id, lock)
            root_lock = cache.inc_host_lock_ref(root_id).to_dec_params()
            cache.ongoing_backup[write_id] = root_id, root_lock
        return True

    def _holds_leaf(self, node_id: int) -> bool:
        """Return whether a node is, or is below, a device leaf that an eviction walk has left over."""
        core = self.cache.tree_core
        node = core.node_by_id(node_id)
        while node is not core.root_node and node not in core.evictable_device_leaves:
            node = node.parent
        return node is not core.root_node
