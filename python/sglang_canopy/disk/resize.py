"""Another capacity while the store is in use: more at once, less piece by piece.

A smaller capacity holds from the first moment: nothing more is written until enough has gone. What
is too much is evicted in the policy's order, what lies beyond the last unit allowed is copied into
free ones, and then the files are cut. A crash meanwhile leaves each page right or absent, like any
other: a page's new place is on record after its data, and is cut off the old one after that.
"""

from __future__ import annotations

import numpy as np

from sglang_canopy.disk.eviction import Eviction
from sglang_canopy.disk.index_writer import IndexWriter
from sglang_canopy.disk.journal import kind_of
from sglang_canopy.disk.state import StoreState

EVICTED_A_STEP, MOVED_A_STEP = 256, 16
"""Pages, with the lock held, and with their data read and written without it."""
STEPS_A_SWEEP = 32


class Resize:
    """Changes the capacity, and does what is left of it with each ``sweep``."""

    def __init__(self, state: StoreState, index_writer: IndexWriter, eviction: Eviction) -> None:
        self._state = state
        self._index_writer = index_writer
        self._eviction = eviction

    def to(self, capacity_bytes: int, pin_bytes: int, pin_tenant_bytes: int) -> None:
        """The new limits hold from now on. Pins that exceed them stay until they end, unless
        nothing else is left to evict."""
        state = self._state
        with state.lock:
            state.capacity_bytes = capacity_bytes
            state.units.resize(capacity_bytes // state.content.unit_bytes)
            state.evictable.pin_bytes = pin_bytes
            state.evictable.pin_tenant_bytes = pin_tenant_bytes
            state.resizing = True

    def sweep(self) -> bool:
        """Do a bounded part of what is left. Returns whether anything is."""
        if self._state.resizing and not self._state.unavailable:
            for _ in range(STEPS_A_SWEEP):
                if not self._step():
                    self._finish()
                    break
        return self._state.resizing

    def _step(self) -> bool:
        """Returns whether there may be more to do."""
        state = self._state
        now = state.clock()
        with state.lock:
            for _ in range(EVICTED_A_STEP):
                if state.units.used <= state.units.limit:
                    break
                if not self._evict(now):
                    return False
            else:
                return True
        return self._move_down()

    def _evict(self, now: float) -> bool:
        evictable = self._state.evictable
        victim = evictable.victim(now)
        if victim is not None:
            self._eviction.remove(victim[0], "capacity", now, chosen=True)
            return True
        pinned = next(evictable.pinned_leaves(), None)
        if pinned is not None:
            self._eviction.remove(pinned, "capacity", now)
        return pinned is not None

    def _move_down(self) -> bool:
        """Copy some pages that lie beyond the limit into free units below it."""
        state, content, moves = self._state, self._state.content, []
        with state.lock:
            for row in self._beyond()[:MOVED_A_STEP]:
                old = state.index.units(row)
                if not state.units.has_free_below_limit(len(old)):
                    break  # some are being read; the next sweep finds them free
                new = sorted(state.units.allocate(len(old)))
                state.units.begin_read(old)
                moves.append((row, state.index.keys[row], old, new, state.index.stored[row]))
        for row, key, old, new, stored in moves:
            buffers = [memoryview(bytearray(stored))]
            errors = state.segments.read(content.extents(old, buffers))
            if not any(errors):
                errors = state.segments.write(content.extents(new, buffers))
            error = next((e for e in errors if e is not None), None)
            with state.lock:
                same = state.index.keys[row] == key and state.index.units(row) == old
                if same and error is None:
                    state.index.set_units(row, tuple(new))
                    state.units.free(old)
                    self._index_writer.mark_changed(row)
                else:  # it went, or its data cannot be had
                    state.units.free(new)
                    if same:
                        state.faults.note(kind_of(error) if error else "disk", error)
                        self._eviction.remove_subtree(row, "capacity", state.clock())
                state.units.end_read(old)
        return len(moves) == MOVED_A_STEP

    def _beyond(self) -> list[int]:
        index, limit = self._state.index, self._state.units.limit
        rows = np.flatnonzero(index.array["unit"][: index.top] >= limit).tolist()
        rows += [row for row, more in index.more_units.items() if max(more) >= limit]
        return [row for row in dict.fromkeys(rows) if index.keys[row] is not None]

    def _finish(self) -> None:
        """Cut the files, once nothing beyond the limit is in use."""
        if not self._index_writer.flush():
            return
        state = self._state
        with state.lock:
            end = state.units.end_of_use()
            state.segments.trim(end)
            state.resizing = end > state.units.limit or state.units.used > state.units.limit
