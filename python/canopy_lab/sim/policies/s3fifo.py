"""``s3fifo``: three FIFO queues (Yang et al., SOSP 2023, algorithm 1): small, main, ghost.

New leaves enter the small queue; most are never used again and are evicted soon. A leaf used more
than once in the small queue moves to the main queue, in which each use buys another round. Leaves
evicted from the small queue are recorded in the ghost queue. If such a leaf returns, it enters the
main queue.

A tree removes nodes and creates new ones, so a ghost is not a node: it is the hash of the first
evicted block, which is chained over everything before it. A request whose path contains a ghost
creates its new nodes in the main queue.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from sglang_canopy import declared
from sglang_canopy.declared import declare_key
from sglang_canopy.policy.base import Policy, Victim
from sglang_canopy.policy.structures.lazy_heap import LazyHeap
from sglang_canopy.records import Leaf, Request

_MAX_USES = 3
"""Maximum counted uses of a leaf (two bits)."""
_MAX_REQUESTS = 4096
"""Requests with recorded paths, for leaves admitted long after their creation."""
_MAX_BLOCKS = 1 << 20
"""Blocks of recorded paths, 8 bytes each. Dropped paths make no ghosts."""
_64_BITS = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class Config(declared.Checked):
    small_share: float = declare_key(
        0.1, "Share of the evictable tokens above which the small queue evicts.", low=0, high=1
    )
    promote_uses: int = declare_key(
        2,
        "Uses in the small queue, the first not counted, that move a leaf to the main queue.",
        low=1,
        high=_MAX_USES,
    )
    ghost_share: float = declare_key(
        0.9, "Tokens the ghost queue remembers, as a share of the evictable tokens.", low=0
    )


@dataclass(slots=True)
class _Place:
    """``Leaf.rank_state``: the place of a node in the queues, admitted or not."""

    queue: LazyHeap
    since: float
    """Time of entry into the queue."""
    seen: int
    """Uses that no longer count."""
    path: Sequence[int]
    """Hashes of the node's blocks."""
    block_tokens: int

    def uses(self, leaf: Leaf) -> int:
        return min(leaf.hits - self.seen, _MAX_USES)


class S3FIFO(Policy):
    """Quick demotion through a small queue, a main queue with lazy promotion, and a ghost queue.

    Sizes are of evictable tokens: a policy does not see the nodes above the leaves, which cannot be
    evicted. O(log n); a leaf moves at most four times between two uses.
    """

    name: ClassVar[str] = "s3fifo"
    Config: ClassVar[type] = Config
    learns: bool = True
    reads_labels: ClassVar[bool] = False

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self._small, self._main = LazyHeap(), LazyHeap()
        self._tokens = {self._small: 0, self._main: 0}
        self._lengths: dict[Leaf, int] = {}
        self._ghosts: dict[int, int] = {}
        self._ghost_tokens = 0
        self._paths: dict[float, tuple[array[int], int]] = {}
        """Request time -> (its blocks, tokens per block)."""
        self._blocks = 0
        self._returned: dict[float, None] = {}
        """Times of requests that contained a ghost."""

    def arrive(self, request: Request) -> str:
        path = self._note_path(request)
        if not self._ghosts.keys().isdisjoint(path):
            for block in self._ghosts.keys() & path:
                self._ghost_tokens -= self._ghosts.pop(block)
            self._returned[request.time] = None
            if len(self._returned) > 16 * _MAX_REQUESTS:
                del self._returned[next(iter(self._returned))]
        return super().arrive(request)

    def finish(self, request: Request) -> str:
        self._note_path(request)  # the path now includes the answer
        return super().finish(request)

    def admit(self, leaf: Leaf, now: float) -> None:
        if leaf.rank_state is None:
            leaf.rank_state = self._enter(leaf)
        self._push(leaf, leaf.rank_state)

    def drop(self, leaf: Leaf) -> None:
        length = self._lengths.pop(leaf, None)
        if length is not None:
            queue = leaf.rank_state.queue
            queue.discard(leaf)
            self._tokens[queue] -= length

    # while there are leaves:
    #     if small > its share: leaf = small.oldest; used more than once: move it to main
    #     else:                 leaf = main.oldest;  used: take one use, to the end of main
    #     neither: victim = leaf
    def victim(self, now: float) -> Victim | None:
        while self._lengths:
            share = self.config.small_share * sum(self._tokens.values())
            from_small = len(self._small) > 0 and (
                self._tokens[self._small] > share or not len(self._main)
            )
            leaf = (self._small if from_small else self._main).least()
            assert leaf is not None, "token counts and queues disagree"
            uses = leaf.rank_state.uses(leaf)
            if uses < (self.config.promote_uses if from_small else 1):
                return Victim(leaf)
            left = 0 if from_small else uses - 1
            self.drop(leaf)
            leaf.rank_state.queue, leaf.rank_state.since, leaf.rank_state.seen = (
                self._main,
                now,
                leaf.hits - left,
            )
            self._push(leaf, leaf.rank_state)
        return None

    def evicted(self, leaf: Leaf, tokens: int) -> None:
        place = leaf.rank_state
        if place.queue is not self._small:
            return
        first = (leaf.offset + leaf.length - tokens) // place.block_tokens
        first -= leaf.offset // place.block_tokens
        if first < len(place.path):
            self._remember(place.path[first], tokens)

    def split(self, leaf: Leaf, head: Leaf) -> None:
        place = leaf.rank_state
        if place is None:
            return
        blocks = head.offset // place.block_tokens
        blocks = leaf.offset // place.block_tokens - blocks
        head.rank_state = _Place(
            place.queue, place.since, place.seen, place.path[:blocks], place.block_tokens
        )
        place.path = place.path[blocks:]
        if leaf in self._lengths:
            self._tokens[place.queue] += leaf.length - self._lengths[leaf]
            self._lengths[leaf] = leaf.length

    def leaves(self) -> Iterator[Leaf]:
        return iter(self._lengths)

    def _enter(self, leaf: Leaf) -> _Place:
        """Return the place of a node seen for the first time, possibly long after its creation."""
        whole, block_tokens = self._paths.get(leaf.last_access, ((), 1))
        start, end = leaf.offset, leaf.offset + leaf.length
        path = whole[start // block_tokens : -(-end // block_tokens)]
        queue = self._main if leaf.created in self._returned else self._small
        return _Place(queue, leaf.created, 1, path, block_tokens)

    def _push(self, leaf: Leaf, place: _Place) -> None:
        place.queue.push(leaf, place.since)
        self._lengths[leaf] = leaf.length
        self._tokens[place.queue] += leaf.length

    def _remember(self, block: int, tokens: int) -> None:
        self._ghost_tokens += tokens - self._ghosts.pop(block, 0)
        self._ghosts[block] = tokens
        limit = self.config.ghost_share * sum(self._tokens.values())
        while self._ghost_tokens > limit and self._ghosts:
            self._ghost_tokens -= self._ghosts.pop(next(iter(self._ghosts)))

    def _note_path(self, request: Request) -> array[int]:
        try:
            path = array("Q", request.path)
        except OverflowError:
            path = array("Q", [block & _64_BITS for block in request.path])
        self._blocks += len(path)
        earlier = self._paths.pop(request.time, None)
        if earlier is not None:
            self._blocks -= len(earlier[0])
        self._paths[request.time] = path, request.block_tokens
        while len(self._paths) > _MAX_REQUESTS or self._blocks > _MAX_BLOCKS:
            self._blocks -= len(self._paths.pop(next(iter(self._paths)))[0])
        return path


POLICY = S3FIFO
