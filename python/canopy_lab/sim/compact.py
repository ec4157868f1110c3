"""A compact in-memory trace, whose size depends on the distinct blocks.

Block ids are chained: equal ids mean equal paths. A path is stored once, as the blocks that it adds to
the path it continues; a request is a path and the depth at which it ends. In 200 long agent
conversations each block repeats about thirty times.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from itertools import chain
from typing import Any, overload

from canopy_lab.trace.record import TraceRequest
from sglang_canopy.policy.block_tree import shared_run_blocks

_FIELDS = tuple(f.name for f in fields(TraceRequest))
_BLOCKS_INDEX = _FIELDS.index("blocks")


class CompactTrace(Sequence[TraceRequest]):
    """The records of a trace, in a sequence that can be pickled."""

    def __init__(self, trace: Iterable[TraceRequest]) -> None:
        self.runs: list[tuple[int, ...]] = []
        """Blocks of each run, which continues its parent run."""
        self.parents = array("q")
        """Parent of each run; -1 at the root."""
        self.depths = array("q")
        """Depth of each run's start, in blocks."""
        self._repeated = array("q")
        """Leading blocks of each run that a later request contains."""
        self._rows: list[tuple[Any, ...]] = []
        self.run_of_request = array("q")
        self.distinct_blocks = 0
        first_runs: dict[int, int] = {}
        """First block -> run."""
        for record in trace:
            path = record.blocks
            run, depth = self._find_stored(path, first_runs)
            if depth < len(path):
                self.runs.append(path[depth:])
                self.parents.append(run)
                self.depths.append(depth)
                self._repeated.append(0)
                run = first_runs[path[depth]] = len(self.runs) - 1
                self.distinct_blocks += len(path) - depth
            row = [getattr(record, name) for name in _FIELDS]
            row[_BLOCKS_INDEX] = len(path)
            self._rows.append(tuple(sys.intern(v) if isinstance(v, str) else v for v in row))
            self.run_of_request.append(run)

    def _find_stored(self, path: tuple[int, ...], first_runs: Mapping[int, int]) -> tuple[int, int]:
        """Return the run in which the stored part of ``path`` ends, and its length in blocks."""
        run, end = -1, 0
        while end < len(path):
            following = first_runs.get(path[end])
            if following is None or (self.parents[following], self.depths[following]) != (run, end):
                break
            blocks = self.runs[following]
            run = following
            if path[end : end + len(blocks)] == blocks:
                end += len(blocks)
            else:
                end += shared_run_blocks(blocks, path, end)
            self._repeated[run] = max(self._repeated[run], end - self.depths[run])
        return run, end

    @property
    def repeated_blocks(self) -> int:
        """Distinct blocks that more than one request contains."""
        return sum(self._repeated)

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
        row[_BLOCKS_INDEX] = self._path(self.run_of_request[index], row[_BLOCKS_INDEX])
        return TraceRequest(*row)

    def __iter__(self) -> Iterator[TraceRequest]:
        return map(self.__getitem__, range(len(self)))

    def _path(self, run: int, blocks: int) -> tuple[int, ...]:
        """Return the first ``blocks`` blocks of the path that ends in ``run``."""
        parts = []
        while run >= 0:
            start = self.depths[run]
            parts.append(self.runs[run][: blocks - start])
            run, blocks = self.parents[run], start
        if len(parts) == 1:
            return parts[0]
        return tuple(chain.from_iterable(reversed(parts)))
