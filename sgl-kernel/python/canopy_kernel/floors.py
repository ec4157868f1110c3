"""What each kernel computes and moves, by arithmetic, beside the least that its task needs.

A floor counts each visible pair of query and key once, and each byte of input and output once.
What a kernel does above it: whole tiles where a mask hides part, keys read again by every tile,
parts that are written and merged. Nothing here was measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from canopy_kernel import tiles

INDEX_BYTES = 8


@dataclass(frozen=True, slots=True)
class Cost:
    """FLOPs and bytes. Bytes of keys that tiles share are asked of the L2 cache, not all of memory."""

    flops: float
    bytes: float

    def __add__(self, other: Cost) -> Cost:
        return Cost(self.flops + other.flops, self.bytes + other.bytes)

    def seconds(self, flops_per_second: float, bytes_per_second: float) -> float:
        """The roofline: the longer of computing and moving."""
        return max(self.flops / flops_per_second, self.bytes / bytes_per_second)


@dataclass(frozen=True, slots=True)
class Heads:
    """Shape of one layer's attention; itemsize: bytes of a number."""

    heads: int = 32
    kv_heads: int = 8
    dim: int = 128
    itemsize: int = 2

    @property
    def group(self) -> int:
        return self.heads // self.kv_heads


Positions = Sequence[Sequence[int]]
"""Of each request its sorted positions."""


def attention_floor(positions: Positions, lengths: Sequence[int], of: Heads) -> Cost:
    """Two products over every visible pair; queries and results once, keys and values once."""
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
    """The Triton kernel's tiles (:func:`.tiles.plan`), their parts and the merge."""
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
    """Tiles of one query head each, and matrix work that two groups of warps do twice: what this
    kernel did before."""
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
    """Keys before each block through a paged kernel of ``paged_rows`` rows a tile (packed: of all
    query heads of a KV head, as FA3's and FlashInfer's before Hopper; else of one, as FlashInfer's
    on Hopper), the span of each block through the Triton kernel, which
    reads the first result and its log-sum-exp."""
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
    """One tile of every KV head: whole blocks of keys for all its rows, live or not."""
    flops = 4.0 * block_m * _up(keys, block_k) * of.dim
    moved = of.itemsize * (rows * of.dim + 2 * keys * of.dim)
    moved += 4 * block_m * (of.dim + 1) if part else of.itemsize * rows * of.dim
    return Cost(of.kv_heads * flops, float(of.kv_heads * moved))


def rope_scatter_floor(tokens: int, of: Heads) -> Cost:
    """K and V read and written once; angles, positions, slots and rows once a token."""
    width = of.kv_heads * of.dim
    moved = 4 * width * of.itemsize + of.dim * 4 + 3 * INDEX_BYTES
    return Cost(3.0 * width * tokens, float(tokens * moved))


def rope_scatter_joined(tokens: int, of: Heads) -> Cost:
    """The same with the chunks' rows joined before it, and angles read once a head: as it was."""
    width = of.kv_heads * of.dim
    joined = 4 * width * of.itemsize + (of.kv_heads - 1) * (of.dim * 4 + 3 * INDEX_BYTES)
    return rope_scatter_floor(tokens, of) + Cost(0.0, float(tokens * joined))


def _up(n: int, block: int) -> int:
    return -(-n // block) * block
