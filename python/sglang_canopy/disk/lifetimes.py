"""Uses and TTLs of pages. Except for ``touch``, the caller holds the store's lock."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

from sglang_canopy.disk.content import raw_key
from sglang_canopy.disk.index import as_number
from sglang_canopy.disk.index_writer import IndexWriter
from sglang_canopy.disk.page import LABEL_FIELDS, PAGE_FIELDS, PageMeta
from sglang_canopy.disk.state import StoreState

_UNCHANGED_FIELDS = {"offset", "length", "tenant", "created"}
_MAXIMUM_FIELDS = ("last_access", "history")
_OVERWRITTEN_FIELDS = tuple(
    set(PAGE_FIELDS)
    - {*_UNCHANGED_FIELDS, *_MAXIMUM_FIELDS, *LABEL_FIELDS, "hits", "shared", "over"}
)


class Lifetimes:
    """Record uses, and set the column ``expires``."""

    def __init__(self, state: StoreState, index_writer: IndexWriter) -> None:
        self._state = state
        self._index_writer = index_writer

    def touch(self, keys: Sequence[str], meta: PageMeta) -> int:
        """Record a use of a run of pages; see ``DiskStore.touch``."""
        state = self._state
        if state.unavailable:
            return 0
        raw_keys = [raw_key(key) for key in keys]
        now, rows = state.clock(), []
        with state.lock:
            for key in raw_keys:
                row = state.index.row_of.get(key)
                if row is None:
                    break
                rows.append(row)
            if rows:
                self.record_use(list(dict.fromkeys(rows)), meta, now, adds_hit=meta.hits < 1)
        return len(rows)

    def record_use(
        self, path: Sequence[int], meta: PageMeta, now: float, *, adds_hit: bool
    ) -> None:
        """Record one use of all rows of ``path``. ``adds_hit``: add one hit; otherwise ``meta.hits`` is
        the true number. Columns are updated as arrays, because a path may have thousands of pages."""
        state, index, arrays = self._state, self._state.index, self._state.index.arrays
        meta = clamp_to_now(meta, now)
        rows = np.asarray(path, np.int64)
        self._mark_shared(rows, meta)
        for name in LABEL_FIELDS:
            if name not in _UNCHANGED_FIELDS:
                number = index.labels[name].add(getattr(meta, name))
                index.labels[name].move_uses(arrays[name][rows], number)
                arrays[name][rows] = number
                index.labels[name].drop(number)
        hits = arrays["hits"][rows]
        arrays["hits"][rows] = hits + 1 if adds_hit else np.maximum(hits, meta.hits)
        for name in _MAXIMUM_FIELDS:
            arrays[name][rows] = np.maximum(arrays[name][rows], getattr(meta, name))
        for name in _OVERWRITTEN_FIELDS:
            arrays[name][rows] = as_number(getattr(meta, name))
        ttl_s = state.ttl.ttl_s(meta.group, meta.category, meta.ttl_s)
        arrays["expires"][rows] = arrays["last_access"][rows] + ttl_s
        for row in rows[index.arrays["children"][rows] == 0].tolist():
            state.evictable_pages.rerank(row, now)
        self._index_writer.mark_used(path, path[-1])

    def _mark_shared(self, rows: np.ndarray, meta: PageMeta) -> None:
        """Mark pages that another conversation used before as shared. Shared pages are never over."""
        index, arrays = self._state.index, self._state.index.arrays
        labels, earlier = index.labels["conversation"], arrays["conversation"][rows]
        number = labels.find_number(meta.conversation)
        is_other = (earlier != labels.find_number(None)) & (earlier != number)
        shared = arrays["shared"][rows] | is_other | meta.shared
        arrays["shared"][rows] = shared
        arrays["over"][rows] = meta.over & ~shared

    def set_expiry(self, row: int) -> None:
        """Set ``expires`` from the row's last use and TTL."""
        state, index = self._state, self._state.index
        page_ttl_s = index.ttl_s[row]
        ttl_s = state.ttl.ttl_s(
            index.group[row],
            index.label("category", row) if state.ttl.categories else None,
            None if math.isnan(page_ttl_s) else page_ttl_s,
        )
        index.expires[row] = index.last_access[row] + ttl_s


def clamp_to_now(meta: PageMeta, now: float) -> PageMeta:
    """Return a copy whose creation and last access are at most ``now``."""
    return dataclasses.replace(
        meta, created=min(meta.created, now), last_access=min(meta.last_access, now)
    )
