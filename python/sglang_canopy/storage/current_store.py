"""The disk store of one rank for the current weights, with the tree's metadata of its pages. Reads and
writes run on HiCache's storage threads."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from typing import Any

from sglang_canopy.disk.page import PageMeta
from sglang_canopy.disk.store import DiskStore
from sglang_canopy.disk.store_counters import FAULTS
from sglang_canopy.storage import weights
from sglang_canopy.storage.page_table import PageTable
from sglang_canopy.storage.settings import StorageSettings

logger = logging.getLogger(__name__)

PageViews = Sequence[Sequence[memoryview]]
"""Memory of each page, as the host pool's buffers."""
MAX_RETRY_INTERVAL_S = 5.0
"""Maximum seconds between attempts to open an unavailable folder."""


class CurrentStore:
    """Open the store, retry while its folder is unavailable, and replace the store after an update of
    the weights. One thread calls ``maintain`` every ``interval_s``."""

    def __init__(
        self,
        settings: StorageSettings,
        namespace: str,
        page_bytes: int,
        page_tokens: int,
        table: PageTable,
    ) -> None:
        self.settings = settings
        self.table = table
        """Page table with the tree's metadata of pages."""
        self.page_tokens = page_tokens
        self._delivery_lock = threading.Lock()
        self.namespace = namespace
        """Namespace of model, layout and rank, without updates of the weights."""
        self.page_bytes = page_bytes
        self.interval_s = min(settings.sweep_s, MAX_RETRY_INTERVAL_S)
        self._is_suspended = False
        self._weights_id = weights.WEIGHTS.id
        self.store = self._open_store()
        if self.store.unavailable is None:
            self._log_open()
        else:
            logger.warning(
                "Canopy disk tier: %s. It is tried again every %g s, and the server runs without "
                "it until then.",
                self.store.unavailable,
                self.interval_s,
            )

    @property
    def is_outdated(self) -> bool:
        """Whether the KV in memory may be of other weights than the store's pages."""
        return weights.WEIGHTS.pause_reason() is not None or weights.WEIGHTS.id != self._weights_id

    @property
    def unavailable(self) -> str | None:
        """Reason, for operators, why the tier is unavailable, and the condition that ends it."""
        pause_reason = weights.WEIGHTS.pause_reason()
        if pause_reason is not None:
            return pause_reason
        if self.is_outdated:
            return "the weights were updated; the disk tier is about to start again"
        if self.store.unavailable in (None, "closed"):
            return self.store.unavailable
        return f"{self.store.unavailable} (tried again every {self.interval_s:g} s)"

    def suspend(self, reason: str) -> bool:
        """Use the store neither for reads nor for writes until ``resume``, without any I/O. Return
        whether pages of unfinished writes are excluded from now on."""
        self._is_suspended = True
        return self.store.suspend(reason)

    def resume(self) -> None:
        """Permit ``maintain`` to open the folder again. No write of before may be unfinished."""
        self._is_suspended = False

    def maintain(self) -> None:
        """Replace the store after an update of the weights; retry an unavailable folder."""
        if self._is_suspended:
            return
        if self.is_outdated:
            if weights.WEIGHTS.pause_reason() is None:
                self._replace_store()
        elif self.store.unavailable not in (None, "closed") and self.store.open():
            logger.info("Canopy disk tier: available now.")
            self.table.add_refusal()  # pages written to an earlier folder may be lost
            self._log_open()

    def write(self, keys: Sequence[str], views: PageViews, prefix_key: str | None) -> None:
        """Write pages. ``prefix_key``: parent of the first page, unless the tree described one."""
        # NOTE: take the store before checking ``is_outdated``: a store replaced after the check is closed
        # and ignores the write.
        store = self.store
        if self._is_suspended or self.is_outdated:
            return
        first_parent = self.table.parent(keys[0], default=prefix_key)
        metas = self._complete_metadata(
            store, [self.table.description(key) for key in keys], first_parent
        )
        stored = store.write(keys, views, metas, [first_parent, *keys[:-1]])
        self.table.drop_written(keys)
        if not all(stored):
            self.table.add_refusal()

    def read(self, keys: Sequence[str], views: PageViews) -> list[bool]:
        """Read pages, up to the first missing page."""
        store = self.store
        if self.is_outdated:
            return [False] * len(keys)
        metas = store.meta(keys)  # before the read, which changes the last access
        is_read = store.read(keys, views)
        described = [(k, m) for k, m in zip(keys[: sum(is_read)], metas) if m is not None]
        self.table.add_read([k for k, _ in described], [m for _, m in described])
        return is_read

    def deliver_reports(self) -> None:
        """Deliver to the store the requests and uses that the tree reported since the last call."""
        if not self._delivery_lock.acquire(blocking=False):
            return  # another thread delivers them
        try:
            store = self.store
            for event, request in self.table.take_requests():
                if event == "arrive":
                    request.label = None
                    store.arrive(request)
                else:
                    store.finish(request)
            for keys, meta in self.table.take_uses():
                store.touch(keys, meta)
        finally:
            self._delivery_lock.release()

    def _complete_metadata(
        self, store: DiskStore, metas: Sequence[PageMeta | None], parent: str | None
    ) -> list[PageMeta]:
        """Fill in metadata of pages that no tree described: position, and the current time."""
        if None not in metas:
            return list(filter(None, metas))
        now = store.clock()
        parent_meta = store.meta([parent])[0] if parent is not None else None
        offset = 0 if parent_meta is None else parent_meta.offset + parent_meta.length
        complete = []
        for meta in metas:
            if meta is None:
                meta = PageMeta(offset, self.page_tokens, created=now, last_access=now, hits=1)
            complete.append(meta)
            offset = meta.offset + meta.length
        return complete

    def _open_store(self, previous: DiskStore | None = None) -> DiskStore:
        """Open a store for the current weights, with the policy, TTLs and counters of ``previous``."""
        settings, weights_id = self.settings, weights.WEIGHTS.id
        return DiskStore(
            settings.path,
            page_bytes=self.page_bytes,
            capacity_bytes=settings.capacity_bytes,
            policy=previous.policy if previous is not None else settings.make_policy(),
            ttl=previous.ttl if previous is not None else settings.ttl,
            quotas=settings.quota_bytes,
            namespace=f"{self.namespace}|weights={weights_id}" if weights_id else self.namespace,
            is_temporary=bool(weights_id),
            counters=previous.counters if previous is not None else None,
        )

    def _replace_store(self) -> None:
        """Discard the pages of the previous weights, and open a store for the current ones."""
        weights_id = weights.WEIGHTS.id
        self.store.discard()
        replacement = self._open_store(self.store)
        logger.info("Canopy disk tier: the weights were updated, so it starts without pages.")
        self.store = replacement
        self._weights_id = weights_id  # last, because this releases the store for use

    def _log_open(self) -> None:
        store = self.store
        logger.info(
            "Canopy disk tier in %s: %d pages of %d bytes on disk, room for %d, policy %s.",
            self.settings.path,
            len(store),
            self.page_bytes,
            self.settings.capacity_bytes // self.page_bytes,
            self.settings.policy,
        )

    def status(self) -> dict[str, Any]:
        """Return the disk tier's part of ``/canopy/status``: pages and bytes since the start."""
        state = self.store.state
        with state.lock:
            counters = state.counters
            return {
                "unavailable": self.unavailable,
                "capacity_bytes": state.capacity_bytes,
                "used_bytes": state.units.used_units * self.page_bytes,
                "pages": len(state.index),
                "policy": self.settings.policy,
                "tenants_at_quota": state.evictable_pages.count_tenants_at_quota(),
                "written_pages": counters.written_pages,
                "written_bytes": counters.written_bytes,
                "read_pages": counters.read_pages,
                "read_bytes": counters.read_bytes,
                "refused_pages": dict(counters.refused_pages),
                "evicted_pages": dict(counters.evicted_pages),
                "faults": {kind: counters.faults[kind] for kind in FAULTS},
            }
