"""The radix tree of a trace and all uses of its nodes, as arrays.

A *segment* is a run of blocks that the same requests use: no request ends or branches off inside
it, so all its pages have the same uses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from canopy_lab.sim.compact import CompactTrace
from canopy_lab.trace.record import TraceRequest
from sglang_canopy.errors import CanopyError
from sglang_canopy.reuse.categories import label_features

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

MAX_CATEGORIES = 64
"""Distinct category names; the rest share ``OTHER_CATEGORY``."""
OTHER_CATEGORY = "other"
LABEL_PARTS = 3
"""Leading parts of a policy's label (``chat|-|turn1|out<64``) that distinguish categories."""


@dataclass(frozen=True, slots=True)
class Paths:
    """The paths of n requests over r runs, in the order of time. Block b of run k is ``first[k] + b``."""

    block_tokens: int
    start_s: float
    end_s: float
    times_s: Floats
    last: Ints
    """(n,) the block in which each path ends; -1 for an empty path."""
    category: Ints
    """Index into ``categories``."""
    categories: tuple[str, ...]
    first: Ints
    """(r,) first block of each run."""
    parent: Ints
    """(r,) block that each run continues, -1 at the root."""
    missing_tokens: Ints
    """(r,) tokens missing from the run's last block."""
    blocks: tuple[tuple[int, ...], ...]
    """Ids by run."""

    def __len__(self) -> int:
        return len(self.times_s)

    def until(self, end_s: float) -> Paths:
        """Return the paths without the requests after ``end_s``."""
        n = int(np.searchsorted(self.times_s, end_s, side="right"))
        return replace(
            self, end_s=min(self.end_s, end_s), times_s=self.times_s[:n], last=self.last[:n],
            category=self.category[:n],
        )  # fmt: skip


def server_label(request: TraceRequest) -> str:
    """Return the label that the policy ``wa`` gives the request on a server."""
    fields = (request.category, request.stop, request.turn, request.output_tokens)
    return "|".join(label_features(*fields, None))


def paths_of(
    trace: Iterable[TraceRequest], label: Callable[[TraceRequest], str] = server_label
) -> Paths:
    """Return the paths of a whole trace. A time before the previous one counts as equal to it.

    Raises ``CanopyError`` for an empty trace.
    """
    trace = trace if isinstance(trace, CompactTrace) else CompactTrace(trace)
    if not len(trace):
        raise CanopyError("the trace has no requests; give a trace with requests")
    block_tokens = trace[0].block_tokens
    lengths = np.array([len(blocks) for blocks in trace.runs], dtype=np.int64)
    starts = np.cumsum(lengths) - lengths
    depths, parents = np.array(trace.depths, np.int64), np.array(trace.parents, np.int64)
    block_offsets = starts - depths
    missing, times, last_blocks, category = np.zeros(len(lengths), np.int64), [], [], []
    category_numbers: dict[str, int] = {OTHER_CATEGORY: 0}
    run_count = 0
    for request, run in zip(trace, trace.run_of_request):
        depth = len(request.blocks)
        if run >= run_count:
            run_count, missing_tokens = run + 1, depth * block_tokens - request.input_tokens
            missing[run] = min(max(missing_tokens, 0), block_tokens - 1)
        times.append(request.time_s)
        last_blocks.append(block_offsets[run] + depth - 1 if depth else -1)
        name = "|".join(label(request).split("|", LABEL_PARTS)[:LABEL_PARTS])
        if name not in category_numbers and len(category_numbers) < MAX_CATEGORIES:
            category_numbers[name] = len(category_numbers)
        category.append(category_numbers.get(name, 0))
    times_s = np.maximum.accumulate(np.array(times, dtype=np.float64))
    return Paths(
        block_tokens, float(times_s[0]), float(times_s[-1]), times_s, np.array(last_blocks, np.int64),
        np.array(category, np.int64), tuple(category_numbers), starts,
        np.where(parents >= 0, block_offsets[parents] + depths - 1, -1), missing, tuple(trace.runs),
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class PathSegments:
    """s segments, parents before children; n requests; u uses."""

    parent: Ints
    """(s,) -1 at the root."""
    first: NDArray[np.uint64]
    """(s,) id of the first block, which names the subtree."""
    tokens: Ints
    """(s,)"""
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
        times_s = self.times_s[self.use_request]
        gaps_s = np.full(len(times_s), np.inf)
        is_same_segment = self.use_segment[1:] == self.use_segment[:-1]
        gaps_s[:-1][is_same_segment] = (times_s[1:] - times_s[:-1])[is_same_segment]
        return gaps_s

    def deepest_roots(self, roots: Iterable[int]) -> Ints:
        """Return (s,) the index of each segment's deepest ancestor in ``roots`` (ids), or -1.

        Roots must begin a segment (``segments_of(..., split_at=roots)``); others are ignored.
        """
        index = {root: i for i, root in enumerate(roots)}
        root_indices: list[int] = []
        for block, parent in zip(self.first.tolist(), self.parent.tolist()):
            root_indices.append(index.get(block, root_indices[parent] if parent >= 0 else -1))
        return np.array(root_indices, dtype=np.int64)

    def subtree_sum(self, values: NDArray) -> NDArray:
        """Return (s,) sums of ``values`` over each segment's subtree, including itself."""
        total, parent = values.tolist(), self.parent.tolist()
        for segment in range(len(total) - 1, -1, -1):
            if parent[segment] >= 0:
                total[parent[segment]] += total[segment]
        return np.array(total, dtype=values.dtype)


def segments_of(paths: Paths, split_at: Iterable[int] = ()) -> PathSegments:
    """Cut the runs of ``paths`` into segments; each block in ``split_at`` begins one."""
    ends = np.unique(paths.last[paths.last >= 0])
    cut_after, branch_ends = ends, ends
    while len(branch_ends):  # the blocks at which used runs branch off are cut as well
        parents = paths.parent[np.unique(_run_of(paths, branch_ends))]
        branch_ends = np.setdiff1d(parents[parents >= 0], cut_after)
        cut_after = np.union1d(cut_after, branch_ends)
    deepest = np.full(len(paths.first), -1, dtype=np.int64)
    np.maximum.at(deepest, _run_of(paths, cut_after), cut_after)
    split_ids = set(split_at)
    cuts = [
        int(paths.first[run]) + offset - 1
        for run in np.flatnonzero(deepest >= 0).tolist()
        if split_ids and not split_ids.isdisjoint(paths.blocks[run])
        for offset, block in enumerate(paths.blocks[run])
        if offset and block in split_ids and paths.first[run] + offset <= deepest[run]
    ]
    end = np.union1d(cut_after, np.array(cuts, dtype=np.int64))
    run = _run_of(paths, end)
    begins_run = np.append(True, run[1:] != run[:-1])[: len(run)]
    start = np.where(begins_run, paths.first[run], np.append(0, end[:-1] + 1)[: len(run)])
    parents = np.where(begins_run, paths.parent[run], start - 1)
    parent = np.where(parents >= 0, np.searchsorted(end, parents), -1)
    run_end = paths.first[run] + np.array([len(paths.blocks[r]) for r in run.tolist()], np.int64)
    tokens = (end - start + 1) * paths.block_tokens
    tokens -= np.where(end + 1 == run_end, paths.missing_tokens[run], 0)
    first_offsets = zip(run.tolist(), (start - paths.first[run]).tolist())
    first_ids = np.array([paths.blocks[r][offset] for r, offset in first_offsets], dtype=np.uint64)
    leaf = np.where(paths.last >= 0, np.searchsorted(end, paths.last), -1)
    return PathSegments(
        parent, first_ids, tokens, paths.times_s, paths.category, paths.categories, paths.start_s,
        paths.end_s, *_uses(leaf, parent),
    )  # fmt: skip


def _run_of(paths: Paths, block: Ints) -> Ints:
    return np.searchsorted(paths.first, block, side="right") - 1


def _uses(leaf: Ints, parent: Ints) -> tuple[Ints, Ints, tuple[tuple[Ints, Ints], ...]]:
    requests, segments = np.flatnonzero(leaf >= 0), leaf[leaf >= 0]
    by_level = []
    while len(requests):
        by_level.append((requests, segments))
        parents = parent[segments]
        requests, segments = requests[parents >= 0], parents[parents >= 0]
    request = np.concatenate([r for r, _ in by_level] or [leaf[:0]])
    segment = np.concatenate([s for _, s in by_level] or [leaf[:0]])
    order = np.argsort(segment * (len(leaf) + 1) + request, kind="stable")
    positions = np.argsort(order)
    bounds = np.cumsum([len(r) for r, _ in by_level])[:-1]
    levels = tuple(zip((r for r, _ in by_level), np.split(positions, bounds))) if by_level else ()
    return request[order], segment[order], levels
