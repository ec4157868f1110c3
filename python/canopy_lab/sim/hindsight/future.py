"""The next use of every block of a trace, and the base class of hindsight policies."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any, ClassVar, NamedTuple

from canopy_lab.sim.requests import to_requests
from canopy_lab.trace.record import TraceRequest
from sglang_canopy.policy.base import Policy, Victim
from sglang_canopy.policy.structures.lazy_heap import LazyHeap
from sglang_canopy.records import Leaf

NEVER = 1 << 62
"""Value of ``next_use`` for blocks that are not used again."""


class NextUseRun(NamedTuple):
    """Consecutive blocks of a path with the same next request."""

    start: int
    """Depth of the first block, in blocks from the root."""
    next_use: int
    """Index of the next request in the trace, or ``NEVER``."""


class Future:
    """The next use of every block after every request of ``trace``.

    A request that uses a block uses all blocks before it, so along a path next uses never become
    earlier with depth, and a few runs describe the path: memory is O(requests), not O(accesses).
    All blocks of a tree's node were last used by one request, identified by its time (times are
    distinct, see ``to_requests``), so no data is kept per block.
    """

    def __init__(self, trace: Sequence[TraceRequest]) -> None:
        self.block_tokens = trace[0].block_tokens if trace else 1
        self.prompt_tokens = [record.input_tokens for record in trace]
        self._request_by_time = {request.time: i for i, request in enumerate(to_requests(trace))}
        self._run_starts: list[list[int]] = []
        self._next_uses: list[list[int]] = []
        growths: list[int] = []
        next_use_of: dict[int, int] = {}
        for index in range(len(trace) - 1, -1, -1):
            record = trace[index]
            path = record.blocks
            starts: list[int] = []
            next_uses: list[int] = []
            depth = 0
            for following, run in groupby(map(next_use_of.get, path)):
                starts.append(depth)
                next_uses.append(NEVER if following is None else following)
                depth += sum(1 for _ in run)
            self._run_starts.append(starts)
            self._next_uses.append(next_uses)
            full_blocks = min(record.input_tokens // record.block_tokens, len(path))
            following = next_use_of.get(path[full_blocks - 1]) if full_blocks else None
            if following is not None:
                grown = self.prompt_tokens[following] - record.input_tokens - record.output_tokens
                growths.append(max(grown, 0))
            next_use_of.update(dict.fromkeys(path, index))
        self._run_starts.reverse()
        self._next_uses.reverse()
        self.mean_growth_tokens = sum(growths) / len(growths) if growths else 0.0
        """Mean tokens of a continued prompt in excess of its history."""

    def last_run(self, leaf: Leaf) -> NextUseRun:
        """Return the run that ends with ``leaf``'s last block."""
        request_index = self._request_by_time[leaf.last_access]
        starts = self._run_starts[request_index]
        run_index = bisect_right(starts, (leaf.offset + leaf.length) // self.block_tokens - 1) - 1
        return NextUseRun(starts[run_index], self._next_uses[request_index][run_index])

    def needed_blocks(self, request_index: int, threshold_tokens: float) -> int:
        """Return the leading blocks that ``request_index`` needs cached for no tail excess.

        Block i (from 0) counts if missing it leaves more than ``threshold_tokens`` to prefill.
        """
        needed_blocks = (self.prompt_tokens[request_index] - threshold_tokens) / self.block_tokens
        return max(0, -int(-needed_blocks // 1))


class HindsightPolicy(Policy):
    """Ranks a leaf by its last blocks. A subclass defines the rank and the blocks to evict."""

    name: ClassVar[str]
    Config: ClassVar[type]
    reads_labels: ClassVar[bool] = False

    def __init__(self, config: Any, future: Future) -> None:
        super().__init__(config)
        self.future = future
        self._heap = LazyHeap()

    def rank_and_kept_blocks(self, leaf: Leaf) -> tuple[Any, int]:
        """Return (rank, kept blocks of the path); the leaf of least rank is evicted first."""
        raise NotImplementedError

    def admit(self, leaf: Leaf, now: float) -> None:
        self._heap.push(leaf, self.rank_and_kept_blocks(leaf)[0])

    def drop(self, leaf: Leaf) -> None:
        self._heap.discard(leaf)

    def victim(self, now: float) -> Victim | None:
        leaf = self._heap.least()
        if leaf is None:
            return None
        keep_tokens = self.rank_and_kept_blocks(leaf)[1] * self.future.block_tokens - leaf.offset
        return Victim(leaf, max(keep_tokens, 0))

    def leaves(self) -> Iterator[Leaf]:
        return iter(self._heap)
