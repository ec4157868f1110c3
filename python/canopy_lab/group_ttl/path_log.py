"""Record the paths of recent requests in bounded memory.

Ids on a path are chained: equal ids mean equal paths. A path is stored once, as the *run* of blocks
that it adds to the path it continues; a request is the run and depth at which it ends. Recording a
request takes O(log depth) look-ups and one step per run.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from sglang_canopy.errors import CanopyError

MAX_CATEGORIES = 64
"""Distinct category names; the rest share ``OTHER``."""
OTHER = "other"
LABEL_PARTS = 3
"""Leading parts of a policy's label (``chat|-|turn1|out<64``) that distinguish categories."""

MAX_FORGOTTEN = 8
"""Maximum number of expired requests that one ``observe`` drops."""


@dataclass(frozen=True, slots=True)
class PathSnapshot:
    """Immutable copy of a ``PathLog``: n requests over r runs, oldest first."""

    block_tokens: int
    start_s: float
    """Start of the window, on the requests' clock; ``end_s`` is its end."""
    end_s: float
    times_s: NDArray[np.float64]
    run: NDArray[np.int64]
    """(n,) the run in which each path ends; ``blocks``: its depth there (0: no path)."""
    blocks: NDArray[np.int64]
    category: NDArray[np.int64]
    """Index into ``categories``."""
    categories: tuple[str, ...]
    run_parent: NDArray[np.int64]
    """(r,) run that each run continues, -1 at the root, after ``run_depth`` blocks."""
    run_depth: NDArray[np.int64]
    run_missing: NDArray[np.int64]
    """(r,) tokens missing from the run's last block."""
    run_blocks: tuple[tuple[int, ...], ...]
    """Block ids; empty for a dropped run."""

    def __len__(self) -> int:
        return len(self.times_s)

    def until(self, end_s: float) -> PathSnapshot:
        """Return a copy without the requests after ``end_s``."""
        count = int(np.searchsorted(self.times_s, end_s, side="right"))
        return replace(
            self,
            end_s=min(self.end_s, end_s),
            times_s=self.times_s[:count],
            run=self.run[:count],
            blocks=self.blocks[:count],
            category=self.category[:count],
        )


class PathLog:
    """Requests of the last ``window_s`` seconds.

    Holds at most ``max_requests`` requests and ``max_blocks`` distinct blocks. A full log drops its
    oldest requests, which shortens the window without biasing it. Longer paths are cut at
    ``max_blocks``.
    """

    def __init__(
        self,
        *,
        block_tokens: int = 64,
        window_s: float = math.inf,
        max_requests: int = 1 << 17,
        max_blocks: int = 1 << 20,
    ) -> None:
        if not window_s > 0:
            raise CanopyError(f"the window must be a positive number of seconds, got {window_s}")
        for name, value in (("max_requests", max_requests), ("max_blocks", max_blocks)):
            if value < 1:
                raise CanopyError(f"{name} must be 1 or more, got {value}")
        self.block_tokens = block_tokens
        self.window_s = window_s
        self.max_requests, self.max_blocks = max_requests, max_blocks
        self._start_s = math.nan
        self._now_s = -math.inf
        self._log: deque[tuple[float, int, int, int]] = deque()
        self._categories: dict[str, int] = {OTHER: 0}
        self._run_by_block: dict[int, int] = {}
        self._order: OrderedDict[int, float] = OrderedDict()
        """Runs by last use. Parents follow their children, so the first run has no children."""
        self._parent: list[int] = []
        self._depth: list[int] = []
        self._missing: list[int] = []
        self._blocks: list[tuple[int, ...]] = []
        self._free: list[int] = []

    def __len__(self) -> int:
        return len(self._log)

    @property
    def distinct_blocks(self) -> int:
        return len(self._run_by_block)

    def observe(
        self, path: Sequence[int], time_s: float, tokens: int | None = None, category: str = OTHER
    ) -> None:
        """Record a request of ``path`` (ids, shallowest first), ``tokens`` long, at ``time_s``.

        ``tokens`` defaults to whole blocks. A time before the previous one counts as equal to it.
        """
        now = self._now_s = max(self._now_s, time_s)
        if math.isnan(self._start_s):
            self._start_s = now
        depth = min(len(path), self.max_blocks)
        self._forget(now, depth)
        run = self._run_of(path, depth, tokens) if depth else -1
        self._log.append((now, run, depth, self._category(category)))
        order, parent = self._order, self._parent
        while run >= 0:
            order[run] = now
            order.move_to_end(run)
            run = parent[run]

    def snapshot(self) -> PathSnapshot:
        """Return a copy, in O(requests + runs)."""
        log = np.array(self._log, dtype=np.float64).reshape(-1, 4)
        ints = log[:, 1:].astype(np.int64)
        start = self._start_s if self._log else 0.0
        return PathSnapshot(
            self.block_tokens,
            start,
            self._now_s if self._log else 0.0,
            log[:, 0],
            ints[:, 0],
            ints[:, 1],
            ints[:, 2],
            tuple(self._categories),
            np.array(self._parent, dtype=np.int64),
            np.array(self._depth, dtype=np.int64),
            np.array(self._missing, dtype=np.int64),
            tuple(self._blocks),
        )

    def check(self) -> None:
        """Verify all invariants, for tests. Raises ``AssertionError``."""
        used = set(self._order)
        assert used.isdisjoint(self._free)
        assert len(used) + len(self._free) == len(self._blocks)
        blocks = {b: r for r in used for b in self._blocks[r]}
        assert blocks == self._run_by_block, "every block of a run is listed, and no other"
        assert len(self._run_by_block) <= self.max_blocks, len(self._run_by_block)
        assert len(self._log) <= self.max_requests
        for _, run, depth, _ in self._log:
            assert run < 0 or run in used, f"run {run} was forgotten while a request ends in it"
            assert run < 0 or depth <= self._depth[run] + len(self._blocks[run])
        for run in used:
            assert self._parent[run] < 0 or self._parent[run] in used

    def _run_of(self, path: Sequence[int], depth: int, tokens: int | None) -> int:
        run_by_block = self._run_by_block
        # Known blocks come first on a chained path.
        new = bisect_left(path, True, 0, depth, key=lambda block: block not in run_by_block)
        if new == depth:
            return run_by_block[path[depth - 1]]
        blocks = tuple(path[new:depth])
        parent = run_by_block[path[new - 1]] if new else -1
        missing = 0
        if tokens is not None and depth == len(path):
            missing = min(max(depth * self.block_tokens - tokens, 0), self.block_tokens - 1)
        if self._free:
            run = self._free.pop()
            self._parent[run], self._depth[run] = parent, new
            self._missing[run], self._blocks[run] = missing, blocks
        else:
            run = len(self._blocks)
            self._parent.append(parent)
            self._depth.append(new)
            self._missing.append(missing)
            self._blocks.append(blocks)
        run_by_block.update(dict.fromkeys(blocks, run))
        return run

    def _forget(self, now: float, coming: int) -> None:
        log, run_by_block = self._log, self._run_by_block
        for _ in range(min(MAX_FORGOTTEN, len(log))):
            if log[0][0] >= now - self.window_s and len(log) < self.max_requests:
                break
            self._drop_oldest()
        while log and len(run_by_block) + coming > self.max_blocks:
            self._drop_oldest()

    def _drop_oldest(self) -> None:
        self._log.popleft()
        oldest = self._log[0][0] if self._log else math.inf
        self._start_s = min(oldest, self._now_s)
        order, run_by_block = self._order, self._run_by_block
        while order:
            run, used = next(iter(order.items()))
            if used >= oldest:
                break
            del order[run]
            for block in self._blocks[run]:
                del run_by_block[block]
            self._blocks[run] = ()
            self._free.append(run)

    def _category(self, name: str) -> int:
        found = self._categories.get(name)
        if found is not None:
            return found
        name = "|".join(name.split("|", LABEL_PARTS)[:LABEL_PARTS])
        found = self._categories.get(name)
        if found is None:
            if len(self._categories) >= MAX_CATEGORIES:
                return 0
            found = self._categories[name] = len(self._categories)
        return found
