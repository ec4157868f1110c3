"""LRU at every capacity from one pass: stack distances (Mattson et al., 1970).

A block hits in an LRU cache of C blocks if and only if fewer than C other blocks are younger than
it when its request arrives. The tree touches all blocks of a request at one time and evicts the
deepest first. A request therefore counts as accesses to its blocks, deepest first, with all lookups
before any move. One pass gives the distance of each access, and with it the hits at every capacity,
equal to ``simulate`` with ``lru``.

The distances of a chunk of accesses are counted with numpy in O(n log n) steps over whole arrays.
Between chunks only the LRU stack is kept: memory is O(distinct blocks).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from canopy_lab.trace.record import TraceRequest
from sglang_canopy.errors import CanopyError

COLD = np.iinfo(np.int64).max
"""Distance of a block's first access: a miss at any capacity."""

_BATCH_ACCESSES = 1 << 19


@dataclass(frozen=True, slots=True)
class LRUCurve:
    """Hits of LRU at every capacity, from one pass over a trace."""

    requests: int
    blocks: int
    tokens: int
    distinct_blocks: int
    block_hits_at: NDArray[np.int64]
    """``block_hits_at[c]``: hits of a cache of c blocks."""
    token_hits_at: NDArray[np.int64]

    def block_hits(self, capacity_blocks: int) -> int:
        """Return the leading blocks found cached, over the whole trace."""
        return int(self.block_hits_at[min(capacity_blocks, len(self.block_hits_at) - 1)])

    def token_hits(self, capacity_blocks: int) -> int:
        """Return the prompt tokens found cached, over the whole trace."""
        return int(self.token_hits_at[min(capacity_blocks, len(self.token_hits_at) - 1)])


def lru_curve(trace: Iterable[TraceRequest], *, batch_accesses: int = _BATCH_ACCESSES) -> LRUCurve:
    """Stream ``trace`` once. Raises ``CanopyError`` for an empty trace."""
    histogram = _Histogram()
    requests = blocks = tokens = 0
    stack = StackDistances()
    for batch in _batches(trace, batch_accesses):
        histogram.add(stack.distances(batch.ids, batch.lengths), batch.tokens)
        requests += len(batch.lengths)
        blocks += len(batch.ids)
        tokens += int(batch.tokens.sum())
    if not requests:
        raise CanopyError("the trace has no requests; give a trace with requests")
    block_hits, token_hits = histogram.cumulative()
    return LRUCurve(requests, blocks, tokens, stack.size, block_hits, token_hits)


@dataclass(frozen=True, slots=True)
class _Batch:
    ids: NDArray[np.int64]
    """Blocks of the requests, each request's shallowest first."""
    tokens: NDArray[np.int64]
    """Prompt tokens in each of these blocks."""
    lengths: NDArray[np.int64]
    """Blocks of each request."""


def _batches(trace: Iterable[TraceRequest], min_accesses: int) -> Iterator[_Batch]:
    records: list[TraceRequest] = []
    accesses = 0
    for record in trace:
        records.append(record)
        accesses += len(record.blocks)
        if accesses >= min_accesses:
            yield _make_batch(records, accesses)
            records, accesses = [], 0
    if records:
        yield _make_batch(records, accesses)


def _make_batch(records: list[TraceRequest], accesses: int) -> _Batch:
    ids = np.fromiter(chain.from_iterable(r.blocks for r in records), np.int64, accesses)
    lengths = np.fromiter((len(r.blocks) for r in records), np.int64, len(records))
    sizes = np.fromiter((r.block_tokens for r in records), np.int64, len(records))
    inputs = np.fromiter((r.input_tokens for r in records), np.int64, len(records))
    depth = np.arange(accesses) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    size = np.repeat(sizes, lengths)
    return _Batch(ids, np.clip(np.repeat(inputs, lengths) - depth * size, 0, size), lengths)


class StackDistances:
    """The LRU stack between chunks: block ids, least recent first."""

    def __init__(self) -> None:
        self._ids = np.zeros(0, np.int64)

    @property
    def size(self) -> int:
        return len(self._ids)

    def distances(self, ids: NDArray[np.int64], lengths: NDArray[np.int64]) -> NDArray[np.int64]:
        """Update the stack; return distances of a chunk's accesses (order and shape of ``ids``)."""
        order = _deepest_first(lengths)
        # Prepend the stack as if accessed once, least recent first.
        sequence = np.concatenate((self._ids, ids[order]))
        stack_size = len(self._ids)
        previous, last = _previous_access(sequence)
        self._ids = sequence[np.sort(last)]
        positions = np.arange(stack_size, len(sequence))
        previous_positions = previous[positions]
        # Count the distinct ids accessed since: all positions between, minus repetitions.
        distance = positions - previous_positions - 1 - _greater_before(previous)[positions]
        # A request looks up all blocks at once: subtract its own deeper blocks, which precede the
        # access in the request and were counted once each.
        first = np.repeat(np.cumsum(lengths) - lengths, lengths)
        distance -= np.arange(len(ids)) - first
        distance[previous_positions < 0] = COLD
        result = np.empty_like(distance)
        result[order] = distance
        return result


def _deepest_first(lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the positions that reverse each run of ``lengths``."""
    starts = np.cumsum(lengths) - lengths
    ends = np.repeat(starts + lengths - 1, lengths)
    return ends - (np.arange(lengths.sum()) - np.repeat(starts, lengths))


def _previous_access(sequence: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the previous position of the same id (-1 without one), and each id's last position."""
    order = np.argsort(sequence, kind="stable")
    sorted_ids = sequence[order]
    is_same = sorted_ids[1:] == sorted_ids[:-1]
    previous = np.full(len(sequence), -1, np.int64)
    previous[order[1:][is_same]] = order[:-1][is_same]
    is_last = np.append(~is_same, True) if len(sequence) else np.zeros(0, bool)
    return previous, order[is_last]


def _greater_before(values: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return for each position i the number of j < i with ``values[j] > values[i]``.

    Processes the values bit by bit from the top, and keeps the array sorted by the processed bits
    (stable). If two values agree so far, a 1 before a 0 is one greater value before it.
    """
    count = np.zeros(len(values), np.int64)
    shifted = values + 1
    positions = np.arange(len(values))
    group = np.zeros(len(values), np.int64)
    bits = int(shifted.max()).bit_length() if len(values) else 0
    for bit in range(bits - 1, -1, -1):
        ones = (shifted[positions] >> bit) & 1
        ones_before = np.cumsum(ones) - ones
        is_zero = ones == 0
        # ``group`` is the start of the run of equal high bits.
        in_group = ones_before - ones_before[group]
        count[positions[is_zero]] += in_group[is_zero]
        zeros_before = np.arange(len(values)) - ones_before
        zeros_in_group = zeros_before - zeros_before[group]
        zeros = np.bincount(group, weights=is_zero, minlength=len(group)).astype(np.int64)
        group_zeros = zeros[group]
        destination = group + np.where(is_zero, zeros_in_group, group_zeros + in_group)
        new_positions, new_group = np.empty_like(positions), np.empty_like(group)
        new_positions[destination] = positions
        new_group[destination] = group + np.where(is_zero, 0, group_zeros)
        positions, group = new_positions, new_group
    return count


class _Histogram:
    """Accesses and their tokens by distance."""

    def __init__(self) -> None:
        self._accesses = np.zeros(0, np.int64)
        self._tokens = np.zeros(0, np.int64)

    def add(self, distances: NDArray[np.int64], tokens: NDArray[np.int64]) -> None:
        is_warm = distances != COLD
        distances, tokens = distances[is_warm], tokens[is_warm]
        if not distances.size:
            return
        length = max(len(self._accesses), int(distances.max()) + 1)
        self._accesses = np.pad(self._accesses, (0, length - len(self._accesses)))
        self._tokens = np.pad(self._tokens, (0, length - len(self._tokens)))
        self._accesses += np.bincount(distances, minlength=length)
        # Token counts stay exact in float64 up to 2**53.
        self._tokens += np.bincount(distances, weights=tokens, minlength=length).astype(np.int64)

    def cumulative(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        zero = np.zeros(1, np.int64)
        return (
            np.concatenate((zero, np.cumsum(self._accesses))),
            np.concatenate((zero, np.cumsum(self._tokens))),
        )
