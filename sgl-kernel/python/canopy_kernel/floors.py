"""Computed FLOPs and bytes of each kernel, and the floor of its task. These are not measurements.

A floor counts each visible pair of query and key once, and each byte of input and output once. Kernels
exceed it by computing whole tiles under a mask, reading keys once per tile, and writing and merging
parts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from canopy_kernel import tiles

INDEX_BYTES = 8


@dataclass(frozen=True, slots=True)
class Cost:
    """FLOPs and bytes. Keys shared by tiles are partly read from the L2 cache."""

    flops: float
    bytes: float

    def __add__(self, other: Cost) -> Cost:
        return Cost(self.flops + other.flops, self.bytes + other.bytes)

    def seconds(self, flops_per_second: float, bytes_per_second: float) -> float:
        """Return the roofline time: the longer of compute and transfer."""
        return max(self.flops / flops_per_second, self.bytes / bytes_per_second)


@dataclass(frozen=True, slots=True)
class Heads:
    """Shape of one layer's attention; itemsize: bytes per number."""

    heads: int = 32
    kv_heads: int = 8
    dim: int = 128
    itemsize: int = 2

    @property
    def group(self) -> int:
        return self.heads // self.kv_heads


Positions = Sequence[Sequence[int]]
"""Sorted positions of each request."""


def attention_floor(positions: Positions, lengths: Sequence[int], of: Heads) -> Cost:
    """Return the floor of attention: two products per visible pair, and one transfer of queries,
    results, keys and values."""
    pairs = sum(p + 1 for row in positions for p in row)
    rows = sum(map(len, positions))
    moved = 2 * rows * of.heads * of.dim + 2 * sum(lengths) * of.kv_heads * of.dim
    return Cost(4.0 * of.heads * of.dim * pairs, float(of.itemsize * moved))


def attention_tiles(
    positions: Positions,
    lengths: Sequence[int],
    of: Heads,
    block_m: int = 128,
    block_k: int = 64,
    programs: int = 132,
) -> Cost:
    """Return the cost of the Triton kernel's tiles (:func:`.tiles.plan`), their parts and the merge."""
    counts = [len(row) for row in positions]
    total = Cost(0.0, 0.0)
    for launch in tiles.plan(counts, lengths, of.group, block_m, of.kv_heads, programs):
        for request, first, rows, _, part, parts, _, _ in launch.tiles.tolist():
            stop = positions[request][(first + rows - 1) // of.group] + 1
            share = _up(_up(stop, parts) // parts, block_k)
            keys = max(0, min(share, stop - part * share))
            total += _tile(of, launch.block_m, rows, keys, block_k, parts > 1)
        for _, _, rows, _, parts, _, _, _ in launch.merges.tolist():
            read = 4 * parts * rows * of.dim + of.itemsize * rows * of.dim
            total += Cost(2.0 * of.kv_heads * parts * rows * of.dim, float(of.kv_heads * read))
    return total


def attention_one_head_a_tile(
    positions: Positions, of: Heads, block_m: int = 64, block_k: int = 64, repeated: float = 1.5
) -> Cost:
    """Return the cost of an earlier kernel: tiles of one query head, and matrix work that two groups of
    warps repeat."""
    alone = Heads(of.heads, of.heads, of.dim, of.itemsize)
    total = Cost(0.0, 0.0)
    for row in positions:
        for first in range(0, len(row), block_m):
            some = row[first : first + block_m]
            total += _tile(alone, block_m, len(some), some[-1] + 1, block_k, False)
    return Cost(total.flops * repeated, total.bytes)


def attention_decomposed(
    positions: Positions,
    of: Heads,
    block: int,
    paged_rows: int = 128,
    block_m: int = 128,
    block_k: int = 64,
    packed: bool = True,
) -> Cost:
    """Return the cost of the decomposition into a paged kernel for the keys before each block, and the
    Triton kernel for the spans, which reads the first result and its log-sum-exp.

    ``paged_rows``: rows per tile of the paged kernel. ``packed``: a tile has all query heads of a KV
    head (FA3, and FlashInfer before Hopper), else one query head (FlashInfer on Hopper).
    """
    total = Cost(0.0, 0.0)
    paged = of if packed else Heads(of.heads, of.heads, of.dim, of.itemsize)
    for row in positions:
        for first in range(0, len(row), block):
            some = row[first : first + block]
            rows = len(some) * paged.group
            for at in range(0, rows, paged_rows):
                here = min(paged_rows, rows - at)
                total += _tile(paged, paged_rows, here, some[0], block_k, False)
                total += Cost(0.0, 4.0 * paged.kv_heads * here)
            rows = len(some) * of.group
            for at in range(0, rows, block_m):
                here = min(block_m, rows - at)
                keys = some[(at + here - 1) // of.group] + 1 - some[0]
                total += _tile(of, block_m, here, keys, block_k, False)
                total += Cost(0.0, float(of.kv_heads * here * (of.itemsize * of.dim + 4)))
    return total


def _tile(of: Heads, block_m: int, rows: int, keys: int, block_k: int, part: bool) -> Cost:
    """Return the cost of one tile over all KV heads, with whole key blocks for all rows, live or not."""
    flops = 4.0 * block_m * _up(keys, block_k) * of.dim
    moved = of.itemsize * (rows * of.dim + 2 * keys * of.dim)
    moved += 4 * block_m * (of.dim + 1) if part else of.itemsize * rows * of.dim
    return Cost(of.kv_heads * flops, float(of.kv_heads * moved))


def rope_scatter_floor(tokens: int, of: Heads) -> Cost:
    """Return the floor of rope-scatter: K and V read and written once; angles, positions, slots and row
    numbers read once per token."""
    width = of.kv_heads * of.dim
    moved = 4 * width * of.itemsize + of.dim * 4 + 3 * INDEX_BYTES
    return Cost(3.0 * width * tokens, float(tokens * moved))


def rope_scatter_joined(tokens: int, of: Heads) -> Cost:
    """Return the cost of an earlier kernel: the chunks' rows joined first, angles read per head."""
    width = of.kv_heads * of.dim
    joined = 4 * width * of.itemsize + (of.kv_heads - 1) * (of.dim * 4 + 3 * INDEX_BYTES)
    return rope_scatter_floor(tokens, of) + Cost(0.0, float(tokens * joined))


def _up(n: int, block: int) -> int:
    return -(-n // block) * block
