"""A request used pages: their metadata, TTLs, pins and ranks follow."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from sglang_canopy.disk.content import raw_key
from sglang_canopy.disk.index import OVER, SHARED, as_number
from sglang_canopy.disk.index_writer import IndexWriter
from sglang_canopy.disk.lifetimes import Lifetimes
from sglang_canopy.disk.page import PageMeta
from sglang_canopy.disk.state import StoreState


class UsageRecorder:
    """Notes uses in the index."""

    def __init__(self, state: StoreState, index_writer: IndexWriter, lifetimes: Lifetimes) -> None:
        self._state = state
        self._index_writer = index_writer
        self._lifetimes = lifetimes

    def touch(self, keys: Sequence[str], meta: PageMeta) -> int:
        """A request used a run of pages; see ``DiskStore.touch``."""
        state = self._state
        if state.unavailable:
            return 0
        raw = [raw_key(key) for key in keys]
        now, rows = state.clock(), []
        with state.lock:
            for key in raw:
                row = state.index.rows.get(key)
                if row is None:
                    break
                rows.append(row)
            if rows:
                self.use(list(dict.fromkeys(rows)), meta, now, count=meta.hits < 1)
        return len(rows)

    def use(self, path: Sequence[int], meta: PageMeta, now: float, *, count: bool) -> None:
        """A request used these rows. ``count`` it, unless ``meta`` has the true hits.

        Over columns, not page by page: a path may have thousands of pages. The lock is held.
        """
        state, index, array = self._state, self._state.index, self._state.index.array
        meta = on_store_clock(state.clock, meta, now)
        rows = np.asarray(path, np.int64)
        self._relabel(rows, meta)
        hits = array["hits"][rows]
        array["hits"][rows] = hits + 1 if count else np.maximum(hits, meta.hits)
        array["last_access"][rows] = np.maximum(array["last_access"][rows], meta.last_access)
        array["history"][rows] = np.maximum(array["history"][rows], min(meta.history, 0x7FFFFFFF))
        for name, value in (
            ("turn", meta.turn),
            ("group", meta.group),
            ("keep_until", as_number(meta.keep_until)),
            ("ttl_s", as_number(meta.ttl_s)),
            ("return_at", as_number(meta.return_at)),
            ("slo_ms", as_number(meta.slo_ms)),
        ):
            array[name][rows] = value
        ttl_s = state.ttl.ttl_s(meta.group, meta.category, meta.ttl_s)
        array["expires"][rows] = array["last_access"][rows] + ttl_s
        if state.evictable.pinned_bytes or meta.keep_until is not None:
            self._lifetimes.extend_pins(path, now)
        for row in rows[index.array["children"][rows] == 0].tolist():
            state.evictable.rerank(row, now)
        self._index_writer.mark_used(path, path[-1])

    def _relabel(self, rows: np.ndarray, meta: PageMeta) -> None:
        """Conversation, category and the flags that depend on them."""
        index, array = self._state.index, self._state.index.array
        conversation = index.conversations.take(meta.conversation)
        before = array["conversation"][rows]
        other = (before != index.conversations.number(None)) & (before != conversation)
        flags = array["flags"][rows] & ~np.uint8(OVER)
        flags |= np.where(other | meta.shared, np.uint8(SHARED), np.uint8(0))
        if meta.over:
            flags |= np.where(flags & SHARED, np.uint8(0), np.uint8(OVER))
        array["flags"][rows] = flags
        index.conversations.move(before, conversation)
        array["conversation"][rows] = conversation
        index.conversations.drop(conversation)
        category = index.categories.take(meta.category)
        index.categories.move(array["category"][rows], category)
        array["category"][rows] = category
        index.categories.drop(category)


def on_store_clock(clock: Callable[[], float], meta: PageMeta, now: float) -> PageMeta:
    """A copy with its times on the store's clock, none of the past ones in the future."""
    skew = getattr(clock, "skew_s", 0.0)
    values = {name: getattr(meta, name) for name in PageMeta.__slots__}
    for name in ("created", "last_access"):
        values[name] = min(values[name] - skew, now)
    for name in ("keep_until", "return_at"):
        if values[name] is not None:
            values[name] -= skew
    return PageMeta(**values)
