"""How long a page stays whatever the policy says: TTLs, and pins that override them.

Methods with an underscore, and those of which it is said, want the store's lock to be held.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from sglang_canopy.disk.content import raw_key
from sglang_canopy.disk.index import as_number
from sglang_canopy.disk.index_writer import IndexWriter
from sglang_canopy.disk.state import StoreState
from sglang_canopy.ttl.table import TTLTable


class Lifetimes:
    """Sets the column ``expires``, and pins."""

    def __init__(self, state: StoreState, index_writer: IndexWriter) -> None:
        self._state = state
        self._index_writer = index_writer

    def set_ttl(self, table: TTLTable) -> None:
        """New TTLs for all pages. A page keeps its group where the new table has its root."""
        state = self._state
        with state.lock:
            index, top = state.index, state.index.top
            groups = index.array["group"][:top]
            new = np.asarray((*table.groups_after(state.ttl), -1), np.int32)
            groups[:] = np.where((groups >= 0) & (groups < len(new) - 1), new[groups], -1)
            state.ttl = table
            index.array["expires"][:top] = index.array["last_access"][:top] + self._ttls(top)
            for row in index.free_rows():
                index.expires[row] = math.inf
            for row in list(state.evictable.pinned_rows()):
                self.set_expiry(row)

    def pin(self, keys: Sequence[str], until: float) -> int:
        """Pin a run of pages; see ``DiskStore.pin``."""
        state = self._state
        if state.unavailable:
            return 0
        raw, pinned = [raw_key(key) for key in keys], 0
        with state.lock:
            for key in raw:
                row = state.index.rows.get(key)
                if row is None:
                    break
                self._keep_at_least(row, until)
                self._index_writer.mark_used((row,))
                if not self.pin_if_asked(row, state.clock()):
                    break
                pinned += 1
        return pinned

    def set_expiry(self, row: int) -> None:
        """From the row's last use, TTL and pin. The lock is held."""
        state, index = self._state, self._state.index
        own = index.ttl_s[row]
        ttl_s = state.ttl.ttl_s(
            index.group[row],
            index.label("category", row) if state.ttl.categories else None,
            None if math.isnan(own) else own,
        )
        expires = index.last_access[row] + ttl_s
        until = state.evictable.pinned_until(row)
        index.expires[row] = expires if until is None else max(expires, until)

    def pin_if_asked(self, row: int, now: float) -> bool:
        """Pin the row where its ``keep_until`` asks for it. The lock is held."""
        state, index = self._state, self._state.index
        until = index.keep_until[row]
        if not until > now:  # nan: nobody asked
            return False
        if (state.evictable.pinned_until(row) or until - 1) >= until:
            return True
        if not state.evictable.pin(row, until):
            state.counters.pins_refused += 1
            # Refused, it ranks like any other page; a shorter pin that it has goes on.
            index.keep_until[row] = as_number(state.evictable.pinned_until(row))
            return False
        state.counters.pinned += 1
        self.set_expiry(row)
        return True

    def extend_pins(self, rows: Sequence[int], now: float) -> None:
        """A use does not shorten a pin; it may ask for a longer one. The lock is held."""
        for row in rows:
            until = self._state.evictable.pinned_until(row)
            if until is not None:
                self._keep_at_least(row, until)
                self.set_expiry(row)
            self.pin_if_asked(row, now)

    def _keep_at_least(self, row: int, until: float) -> None:
        """At least until then: a pin that was asked for may last longer."""
        if not self._state.index.keep_until[row] > until:
            self._state.index.keep_until[row] = until

    def _ttls(self, top: int) -> Any:
        """The TTL of every row, in seconds."""
        index, table = self._state.index, self._state.ttl
        by_category = np.full(index.labels["category"].capacity() + 1, table.residual_ttl_s)
        if table.categories:
            for number, category in index.labels["category"].items():
                by_category[number] = table.ttl_s(-1, category)
        by_group = np.asarray([*(g.ttl_s for g in table.groups), math.nan])
        group = index.array["group"][:top]
        listed = (group >= 0) & (group < len(table.groups))
        ttls = np.where(
            listed,
            by_group[np.where(listed, group, -1)],
            by_category[index.array["category"][:top]],
        )
        own = index.array["ttl_s"][:top]
        return np.where(np.isnan(own), ttls, own)
