"""Writing and reading pages with their metadata, and passing uses on to the store.

All of it runs on HiCache's storage threads or the sweeper's.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

from sglang_canopy.disk import DiskStore
from sglang_canopy.disk.page import PageMeta
from sglang_canopy.storage.page_table import PageTable

Views = Sequence[Sequence[memoryview]]
"""Each page's memory, in the pieces in which the host pool has it."""


class PageTransfer:
    """Between the store and ``table``, where the tree describes its pages."""

    def __init__(self, table: PageTable, page_tokens: int) -> None:
        self.table = table
        self.page_tokens = page_tokens
        self._passing_on = threading.Lock()

    def write(
        self, store: DiskStore, keys: Sequence[str], views: Views, prefix_key: str | None
    ) -> None:
        """Write pages; ``prefix_key`` is the page before the first, where the tree named none."""
        first = self.table.parent(keys[0], default=prefix_key)
        metas = self._described(store, [self.table.description(key) for key in keys], first)
        stored = store.write(keys, views, metas, [first, *keys[:-1]])
        self.table.written(keys)
        if not all(stored):
            self.table.add_refusal()

    def read(self, store: DiskStore, keys: Sequence[str], views: Views) -> list[bool]:
        """Read pages, up to the first that is not there."""
        metas = store.meta(keys)  # before the read, which is a use
        ok = store.read(keys, views)
        found = [(k, m) for k, m in zip(keys[: sum(ok)], metas) if m is not None]
        self.table.add_read([k for k, _ in found], [m for _, m in found])
        return ok

    def pass_on(self, store: DiskStore) -> None:
        """Pass on to ``store`` the requests and uses since the last time."""
        if not self._passing_on.acquire(blocking=False):
            return  # another thread is at it
        try:
            for event, request in self.table.take_requests():
                if event == "arrive":
                    request.label = None
                    store.arrive(request)
                else:
                    store.finish(request)
            for keys, meta in self.table.take_uses():
                store.touch(keys, meta)
        finally:
            self._passing_on.release()

    def _described(
        self, store: DiskStore, metas: Sequence[PageMeta | None], parent: str | None
    ) -> list[PageMeta]:
        """Where no tree of ours describes a page: its place, and that it is now."""
        if None not in metas:
            return list(filter(None, metas))
        now = store.clock() + getattr(store.clock, "skew_s", 0.0)
        above = store.meta([parent])[0] if parent is not None else None
        offset = above.offset + above.length if above is not None else 0
        described = []
        for meta in metas:
            if meta is None:
                meta = PageMeta(offset, self.page_tokens, created=now, last_access=now, hits=1)
            described.append(meta)
            offset = meta.offset + meta.length
        return described
