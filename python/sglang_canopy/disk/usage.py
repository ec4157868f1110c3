"""A request used pages: their metadata, TTLs, pins and ranks follow."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

from sglang_canopy.disk.content import raw_key
from sglang_canopy.disk.index import as_number
from sglang_canopy.disk.index_writer import IndexWriter
from sglang_canopy.disk.lifetimes import Lifetimes
from sglang_canopy.disk.page import FIELDS, LABELS, PageMeta
from sglang_canopy.disk.state import StoreState

_OF_THE_PAGE = {"offset", "length", "tenant", "created"}
"""What a use does not change."""
_GREATEST = ("last_access", "history")
_OVERWRITTEN = tuple(set(FIELDS) - {*_OF_THE_PAGE, *_GREATEST, *LABELS, "hits", "shared", "over"})


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
        self._mark_shared(rows, meta)
        for name in LABELS:
            if name not in _OF_THE_PAGE:
                number = index.labels[name].take(getattr(meta, name))
                index.labels[name].move(array[name][rows], number)
                array[name][rows] = number
                index.labels[name].drop(number)
        hits = array["hits"][rows]
        array["hits"][rows] = hits + 1 if count else np.maximum(hits, meta.hits)
        for name in _GREATEST:
            array[name][rows] = np.maximum(array[name][rows], getattr(meta, name))
        for name in _OVERWRITTEN:
            array[name][rows] = as_number(getattr(meta, name))
        ttl_s = state.ttl.ttl_s(meta.group, meta.category, meta.ttl_s)
        array["expires"][rows] = array["last_access"][rows] + ttl_s
        if state.evictable.pinned_bytes or meta.keep_until is not None:
            self._lifetimes.extend_pins(path, now)
        for row in rows[index.array["children"][rows] == 0].tolist():
            state.evictable.rerank(row, now)
        self._index_writer.mark_used(path, path[-1])

    def _mark_shared(self, rows: np.ndarray, meta: PageMeta) -> None:
        """Pages that another conversation used before are shared, and none of those is over."""
        index, array = self._state.index, self._state.index.array
        conversations, before = index.labels["conversation"], array["conversation"][rows]
        conversation = conversations.number(meta.conversation)
        other = (before != conversations.number(None)) & (before != conversation)
        shared = array["shared"][rows] | other | meta.shared
        array["shared"][rows] = shared
        array["over"][rows] = meta.over & ~shared


def on_store_clock(clock: Callable[[], float], meta: PageMeta, now: float) -> PageMeta:
    """A copy with its times on the store's clock, none of the past ones in the future."""
    meta = dataclasses.replace(meta)
    meta.shift(-getattr(clock, "skew_s", 0.0))
    meta.created, meta.last_access = min(meta.created, now), min(meta.last_access, now)
    return meta
