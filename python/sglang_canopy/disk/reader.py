"""Lookup and reading of pages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sglang_canopy.disk.content import PageBuffers, raw_key
from sglang_canopy.disk.counters import kind_of
from sglang_canopy.disk.eviction import Eviction
from sglang_canopy.disk.index_writer import IndexWriter
from sglang_canopy.disk.lifetimes import Lifetimes
from sglang_canopy.disk.state import StoreState


@dataclass(slots=True)
class _PageRead:
    """One page of a batch, with its index entry at the start of the batch."""

    key: bytes
    row: int
    checksum: int
    unit: int
    target: list[memoryview]


class PageReader:
    """Look up and read runs of pages."""

    def __init__(
        self,
        state: StoreState,
        index_writer: IndexWriter,
        lifetimes: Lifetimes,
        eviction: Eviction,
    ) -> None:
        self._state = state
        self._index_writer = index_writer
        self._lifetimes = lifetimes
        self._eviction = eviction

    def leading(self, keys: Sequence[str], now: float | None = None) -> int:
        """Return the length of the readable run of ``keys``; see ``DiskStore.leading``."""
        state = self._state
        if state.unavailable:
            return 0
        now = state.clock() if now is None else now
        raw = [raw_key(key) for key in keys]
        found = alive = 0
        with state.lock:
            rows, expires = state.index.rows, state.index.expires
            for key in raw:
                row = rows.get(key)
                if row is None:
                    break
                found += 1
                if expires[row] > now:
                    alive = found
            counters = state.counters
            counters.lookups += len(raw)
            counters.found += alive
            counters.expired_lookups += found - alive
        return alive

    def read(self, keys: Sequence[str], into: Sequence[PageBuffers]) -> list[bool]:
        """Fill the buffers of ``into``; see ``DiskStore.read``."""
        state = self._state
        if state.unavailable:
            return [False] * len(keys)
        raw = [raw_key(key) for key in keys]
        now = state.clock()
        with state.lock:
            batch = self._locate(raw, into)
            units, allocator = [page.unit for page in batch], state.units
            opening, segments = state.opening, state.segments
            allocator.begin_read(units)
        errors = segments.read([(page.unit, page.target) for page in batch])
        good, error = self._count_good(batch, errors)
        with state.lock:
            allocator.end_read(units)
            if opening != state.opening:  # the index was replaced
                return [i < good for i in range(len(keys))]
            self._record_reads(batch[:good], now)
            if good < len(batch):
                self._drop_bad_page(batch[good], error, keys[good], now)
        if good < len(batch):
            self._index_writer.flush()
        return [i < good for i in range(len(keys))]

    def _locate(self, raw: Sequence[bytes], into: Sequence[PageBuffers]) -> list[_PageRead]:
        """Return the leading pages that are on disk."""
        index = self._state.index
        batch = []
        for key, buffers in zip(raw, into):
            row = index.rows.get(key)
            if row is None:
                break
            target = self._state.content.views(buffers)
            batch.append(_PageRead(key, row, index.checksum(row), index.unit[row], target))
        return batch

    def _count_good(
        self, batch: Sequence[_PageRead], errors: Sequence[OSError | None]
    ) -> tuple[int, OSError | None]:
        """Return the number of leading good pages, and the I/O error of the next page, if any."""
        content = self._state.content
        for good, (page, error) in enumerate(zip(batch, errors, strict=True)):
            if error is not None or content.checksum(page.key, page.target) != page.checksum:
                return good, error
        return len(batch), None

    def _record_reads(self, pages: Sequence[_PageRead], now: float) -> None:
        state, index, counters = self._state, self._state.index, self._state.counters
        for page in pages:
            row = page.row
            counters.read += 1
            counters.read_bytes += state.content.page_bytes
            if index.keys[row] != page.key:
                continue  # removed during the read; the data read is valid
            counters.by_category(counters.hits, index.label("category", row))
            if now > index.last_access[row]:
                index.last_access[row] = now
                self._lifetimes.set_expiry(row)
                state.evictable.rerank(row, now)
                self._index_writer.mark_used((row,))

    def _drop_bad_page(self, page: _PageRead, error: OSError | None, key: str, now: float) -> None:
        state = self._state
        # Keep another page that took the row or the key during the read.
        if state.index.rows.get(page.key) != page.row:
            return
        if state.index.checksum(page.row) != page.checksum:
            return
        state.faults.note(
            "corrupt" if error is None else kind_of(error),
            error or f"page {key[:16]}... does not match its checksum",
        )
        self._eviction.remove_subtree(page.row, "corrupt", now)
