"""A compact in-memory trace: its size depends on the distinct blocks, not on the length.

Block ids are chained: equal ids mean equal paths. So a path is stored once, as the blocks it
adds to the path it continues, and a request is where on which path it ends. Two hundred long
agent conversations repeat each block some thirty times: that is the saving.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from itertools import chain
from typing import Any, overload

from canopy_lab.trace.record import TraceRequest
from sglang_canopy.policy.block_tree import shared_run

_NAMES = tuple(f.name for f in fields(TraceRequest))
_BLOCKS = _NAMES.index("blocks")


class CompactTrace(Sequence[TraceRequest]):
    """The records of ``trace``, equal to them one by one; can be pickled."""

    def __init__(self, trace: Iterable[TraceRequest]) -> None:
        self._runs: list[tuple[int, ...]] = []
        """Blocks that a path adds to its parent path."""
        self._parents = array("q")
        """For each run, the run it continues; -1 at the root."""
        self._depths = array("q")
        """Blocks of the path before each run."""
        self._rows: list[tuple[Any, ...]] = []
        self._run_of = array("q")
        self.distinct_blocks = 0
        first: dict[int, int] = {}
        """The run that begins with a block. Of the blocks themselves none is kept but in runs."""
        for record in trace:
            path = record.blocks
            run, at = self._stored(path, first)
            if at < len(path):
                self._runs.append(path[at:])
                self._parents.append(run)
                self._depths.append(at)
                run = first[path[at]] = len(self._runs) - 1
                self.distinct_blocks += len(path) - at
            row = [getattr(record, name) for name in _NAMES]
            row[_BLOCKS] = len(path)
            self._rows.append(tuple(_interned(value) for value in row))
            self._run_of.append(run)

    def _stored(self, path: tuple[int, ...], first: Mapping[int, int]) -> tuple[int, int]:
        """How many blocks of ``path`` are stored, and the run that the last of them is in."""
        run, at = -1, 0
        while at < len(path):
            following = first.get(path[at])
            if following is None or (self._parents[following], self._depths[following]) != (
                run,
                at,
            ):
                break
            blocks = self._runs[following]
            run = following
            if path[at : at + len(blocks)] == blocks:
                at += len(blocks)
            else:
                at += shared_run(blocks, path, at)
        return run, at

    def __len__(self) -> int:
        return len(self._rows)

    @overload
    def __getitem__(self, index: int) -> TraceRequest: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[TraceRequest]: ...
    def __getitem__(self, index: int | slice) -> TraceRequest | Sequence[TraceRequest]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        row = list(self._rows[index])
        row[_BLOCKS] = self._path(self._run_of[index], row[_BLOCKS])
        return TraceRequest(*row)

    def __iter__(self) -> Iterator[TraceRequest]:
        return map(self.__getitem__, range(len(self)))

    def _path(self, run: int, blocks: int) -> tuple[int, ...]:
        """The first ``blocks`` blocks of the path that ends in ``run``."""
        parts = []
        while run >= 0:
            start = self._depths[run]
            parts.append(self._runs[run][: blocks - start])
            run, blocks = self._parents[run], start
        if len(parts) == 1:
            return parts[0]
        return tuple(chain.from_iterable(reversed(parts)))


def _interned(value: Any) -> Any:
    return sys.intern(value) if isinstance(value, str) else value
