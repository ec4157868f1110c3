"""The radix tree of a ``PathSnapshot`` and all uses of its nodes, as arrays.

A *segment* is a run of blocks that the same requests use: no request ends or branches off inside
it, so all its pages have the same uses.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from canopy_lab.group_ttl.path_log import PathSnapshot

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class PathSegments:
    """s segments, parents before children; n requests; u uses."""

    parent: Ints
    """(s,) -1 at the root."""
    first: NDArray[np.uint64]
    """(s,) id of the first block, which names the subtree."""
    depth: Ints
    """(s,) blocks of the path before the segment."""
    tokens: Ints
    """(s,)"""
    leaf: Ints
    """(n,) the segment in which each request's path ends; -1 for an empty path."""
    times_s: Floats
    """(n,) ascending."""
    category: Ints
    """(n,)"""
    categories: tuple[str, ...]
    start_s: float
    end_s: float
    use_request: Ints
    """(u,) uses, by segment and then by time."""
    use_segment: Ints
    levels: tuple[tuple[Ints, Ints], ...]
    """Uses by distance from the leaf: (requests, positions in the use arrays)."""

    def __len__(self) -> int:
        return len(self.parent)

    @property
    def gaps_s(self) -> Floats:
        """(u,) seconds until the next use of the segment; ``inf`` for the last use."""
        times = self.times_s[self.use_request]
        gaps = np.full(len(times), np.inf)
        same = self.use_segment[1:] == self.use_segment[:-1]
        gaps[:-1][same] = (times[1:] - times[:-1])[same]
        return gaps

    def under(self, roots: Iterable[int]) -> Ints:
        """Return (s,) the index of each segment's deepest ancestor in ``roots`` (ids), or -1.

        Roots must begin a segment (``segments_of(..., split_at=roots)``); others are ignored.
        """
        index = {root: i for i, root in enumerate(roots)}
        found = np.full(len(self), -1, dtype=np.int64)
        if index:
            first, parent = self.first.tolist(), self.parent.tolist()
            group = found.tolist()
            for s, block in enumerate(first):
                own = index.get(block)
                if own is not None:
                    group[s] = own
                elif parent[s] >= 0:
                    group[s] = group[parent[s]]
            found[:] = group
        return found

    def subtree_sum(self, values: NDArray) -> NDArray:
        """Return (s,) sums of ``values`` over each segment's subtree, including itself."""
        total, parent = values.tolist(), self.parent.tolist()
        for s in range(len(total) - 1, -1, -1):
            if parent[s] >= 0:
                total[parent[s]] += total[s]
        return np.array(total, dtype=values.dtype)


def segments_of(log: PathSnapshot, split_at: Iterable[int] = ()) -> PathSegments:
    """Cut the runs of ``log`` into segments; each block in ``split_at`` begins one."""
    used = _used_runs(log)
    run, end = _cuts(log, used, split_at)
    run_start = log.run_depth[run]
    first_in_run = np.append(True, run[1:] != run[:-1])[: len(run)]
    start = np.where(first_in_run, run_start, np.append(0, end[:-1])[: len(run)])
    parents = np.arange(len(run)) - 1
    # A run's first segment continues the parent run's segment that ends at the run's depth.
    at_root = first_in_run & (log.run_parent[run] < 0)
    turn = first_in_run & ~at_root
    keys = _key(run, end)
    parents[turn] = np.searchsorted(keys, _key(log.run_parent[run[turn]], start[turn]))
    parents[at_root] = -1
    leaf = np.full(len(log), -1, dtype=np.int64)
    some = log.blocks > 0
    leaf[some] = np.searchsorted(keys, _key(log.run[some], log.blocks[some]))
    # Parents start at a smaller depth than their children.
    order = np.argsort(start, kind="stable")
    place = np.empty_like(order)
    place[order] = np.arange(len(order))
    parent = parents[order]
    parent[parent >= 0] = place[parent[parent >= 0]]
    leaf[some] = place[leaf[some]]
    run, start, end = run[order], start[order], end[order]
    lengths = np.array([len(b) for b in log.run_blocks], dtype=np.int64)
    tokens = (end - start) * log.block_tokens
    tokens -= np.where(end == log.run_depth[run] + lengths[run], log.run_missing[run], 0)
    first = np.array(
        [log.run_blocks[r][d] for r, d in zip(run.tolist(), (start - log.run_depth[run]).tolist())],
        dtype=np.uint64,
    )
    use_request, use_segment, levels = _uses(leaf, parent)
    return PathSegments(
        parent, first, start, tokens, leaf, log.times_s, log.category, log.categories,
        log.start_s, log.end_s, use_request, use_segment, levels,
    )  # fmt: skip


def _used_runs(log: PathSnapshot) -> NDArray[np.bool_]:
    used = np.zeros(len(log.run_parent), dtype=bool)
    now = np.unique(log.run[log.run >= 0])
    while len(now):
        used[now] = True
        now = np.unique(log.run_parent[now])
        now = now[now >= 0]
        now = now[~used[now]]
    return used


def _cuts(log: PathSnapshot, used: NDArray[np.bool_], split_at: Iterable[int]) -> tuple[Ints, Ints]:
    """Return sorted (run, depth) of segment ends, where a request ends or branches off."""
    some = log.blocks > 0
    children = np.flatnonzero(used & (log.run_parent >= 0))
    runs = [log.run[some], log.run_parent[children]]
    ends = [log.blocks[some], log.run_depth[children]]
    wanted = set(split_at)
    if wanted:
        for r in np.flatnonzero(used).tolist():
            blocks = log.run_blocks[r]
            # The first block always begins a segment.
            if not wanted.isdisjoint(blocks[1:]):
                at = [i for i, b in enumerate(blocks) if i and b in wanted]
                runs.append(np.full(len(at), r, dtype=np.int64))
                ends.append(log.run_depth[r] + np.array(at, dtype=np.int64))
    key = np.unique(_key(np.concatenate(runs), np.concatenate(ends)))
    run, end = key >> _DEPTH_BITS, key & ((1 << _DEPTH_BITS) - 1)
    if wanted:
        # A cut below the last use of a run would end nothing.
        deepest = np.zeros(len(used), dtype=np.int64)
        np.maximum.at(deepest, np.concatenate(runs[:2]), np.concatenate(ends[:2]))
        keep = end <= deepest[run]
        run, end = run[keep], end[keep]
    return run, end


_DEPTH_BITS = 24


def _key(run: Ints, depth: Ints) -> Ints:
    return (run << _DEPTH_BITS) | depth


def _uses(leaf: Ints, parent: Ints) -> tuple[Ints, Ints, tuple[tuple[Ints, Ints], ...]]:
    requests, segments = np.flatnonzero(leaf >= 0), leaf[leaf >= 0]
    steps = []
    while len(requests):
        steps.append((requests, segments))
        above = parent[segments]
        on = above >= 0
        requests, segments = requests[on], above[on]
    if not steps:
        empty = np.zeros(0, dtype=np.int64)
        return empty, empty, ()
    request = np.concatenate([r for r, _ in steps])
    segment = np.concatenate([s for _, s in steps])
    order = np.argsort(segment * (len(leaf) + 1) + request, kind="stable")
    place = np.empty_like(order)
    place[order] = np.arange(len(order))
    levels, at = [], 0
    for r, _ in steps:
        levels.append((r, place[at : at + len(r)]))
        at += len(r)
    return request[order], segment[order], tuple(levels)
