"""The work list of the Triton attention kernel: rows, keys and part of each tile, in order.

Row ``i`` of a request is head ``i % group`` of query ``i // group``. A tile thus contains the query heads
of one KV head and reads its keys once for all of them. The list depends only on host numbers and is
computed once for all layers of a forward.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

FEW = 16
"""Rows of the small tile: the minimum of a matrix instruction."""
MIN_KEYS = 512
"""Approximate minimum keys per part; smaller parts cost more to merge."""
MAX_PARTS = 32
FIELDS = 8
"""int32 fields per tile: request, first row, rows, unused, part, parts, place of the part in the
workspace, unused."""


@dataclass(frozen=True, slots=True)
class Launch:
    """One launch of the kernel over tiles of ``block_m`` rows, and its merge.

    tiles: ``[t, FIELDS]`` int32, longest first; merges: ``[u, FIELDS]`` int32, split tiles only:
    request, first row, rows, first part, parts; parts: parts in the workspace.
    """

    block_m: int
    tiles: torch.Tensor
    merges: torch.Tensor
    parts: int


def plan(
    counts: Sequence[int],
    lengths: Sequence[int],
    group: int,
    block_m: int,
    kv_heads: int,
    programs: int | Mapping[int, int],
) -> list[Launch]:
    """Plan tiles of whole requests: of ``block_m`` rows, or of ``FEW`` if a request (a decode row, a
    short question) or its rest has at most that many rows.

    counts, lengths: queries and keys per request; programs: concurrent programs of the chip, or a
    mapping from rows per tile if they differ. With fewer tiles than programs, tiles are split along the
    keys.
    """
    large: list[tuple[int, list[int]]] = []
    small: list[tuple[int, list[int]]] = []
    for request, (m, n) in enumerate(zip(counts, lengths)):
        first, rows = 0, m * group
        while first < rows:
            size = FEW if rows - first <= FEW or block_m <= FEW else block_m
            tile_rows = min(size, rows - first)
            last = (first + tile_rows - 1) // group
            keys = last + 1 + (n - m) * (last + 1) // m  # estimate; positions are on the device
            (small if size == FEW else large).append((keys, [request, first, tile_rows, 0]))
            first += tile_rows
    if isinstance(programs, int):
        programs = {block_m: programs, FEW: programs}
    return [
        _launch(size, sized_tiles, kv_heads, programs[size])
        for size, sized_tiles in ((block_m, large), (FEW, small))
        if sized_tiles
    ]


def _launch(
    block_m: int, sized_tiles: list[tuple[int, list[int]]], kv_heads: int, programs: int
) -> Launch:
    sized_tiles.sort(key=lambda t: -t[0])
    share = max(MIN_KEYS, sum(keys for keys, _ in sized_tiles) * kv_heads // max(1, programs))
    tiles: list[list[int]] = []
    merges: list[list[int]] = []
    place = 0
    for keys, tile in sized_tiles:
        parts = min(MAX_PARTS, -(-keys // share))
        if parts == 1:
            tiles.append([*tile, 0, 1, 0, 0])
            continue
        tiles += [[*tile, part, parts, place + part, 0] for part in range(parts)]
        merges.append([*tile[:3], place, parts, 0, 0, 0])
        place += parts
    return Launch(block_m, _table(tiles), _table(merges), place)


def _table(rows: list[list[int]]) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.int32).reshape(-1, FIELDS)
