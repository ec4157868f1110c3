"""The work list of the Triton attention kernel: rows, keys and part of each tile, in order.

Row ``i`` of a request is head ``i % group`` of query ``i // group``. A tile thus contains the query heads
of one KV head and reads its keys once for all of them. The list depends only on host numbers and is
computed once for all layers of a forward.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

SMALL_TILE_ROWS = 16
"""The minimum of a matrix instruction."""
MIN_PART_KEYS = 512
"""Approximate minimum keys per part; smaller parts cost more to merge."""
MAX_PARTS = 32
TILE_FIELDS = 8
"""int32 fields per tile: request, first row, rows, unused, part, parts, place of the part in the
workspace, unused."""


class Tile(NamedTuple):
    """A whole tile: its approximate keys, and its first four ``TILE_FIELDS``."""

    keys: int
    fields: list[int]


@dataclass(frozen=True, slots=True)
class Launch:
    """One launch of the kernel over tiles of ``block_m`` rows, and its merge.

    tiles: ``[t, TILE_FIELDS]`` int32, longest first; merges: ``[u, TILE_FIELDS]`` int32, split tiles only:
    request, first row, rows, first part, parts; parts: parts in the workspace.
    """

    block_m: int
    tiles: torch.Tensor
    merges: torch.Tensor
    parts: int


def plan_launches(
    query_counts: Sequence[int],
    key_counts: Sequence[int],
    group: int,
    block_m: int,
    kv_heads: int,
    programs: int | Mapping[int, int],
) -> list[Launch]:
    """Plan tiles of whole requests: of ``block_m`` rows, or of ``SMALL_TILE_ROWS`` if a request (a decode row, a
    short question) or its rest has at most that many rows.

    query_counts, key_counts: per request; programs: concurrent programs of the chip, or a
    mapping from rows per tile if they differ. With fewer tiles than programs, tiles are split along the
    keys.
    """
    large: list[Tile] = []
    small: list[Tile] = []
    for request, (queries, keys) in enumerate(zip(query_counts, key_counts)):
        first, rows = 0, queries * group
        while first < rows:
            tile_size = (
                SMALL_TILE_ROWS
                if rows - first <= SMALL_TILE_ROWS or block_m <= SMALL_TILE_ROWS
                else block_m
            )
            tile_rows = min(tile_size, rows - first)
            tile_queries = (first + tile_rows - 1) // group + 1
            # An estimate: the positions are on the device.
            tile_keys = tile_queries + (keys - queries) * tile_queries // queries
            tiles = small if tile_size == SMALL_TILE_ROWS else large
            tiles.append(Tile(tile_keys, [request, first, tile_rows, 0]))
            first += tile_rows
    if isinstance(programs, int):
        programs = {block_m: programs, SMALL_TILE_ROWS: programs}
    return [
        _make_launch(size, tiles, kv_heads, programs[size])
        for size, tiles in ((block_m, large), (SMALL_TILE_ROWS, small))
        if tiles
    ]


def _make_launch(block_m: int, tiles: list[Tile], kv_heads: int, programs: int) -> Launch:
    """Split tiles of many keys into parts, longest first."""
    tiles.sort(key=lambda tile: -tile.keys)
    total_keys = sum(tile.keys for tile in tiles) * kv_heads
    part_keys = max(MIN_PART_KEYS, total_keys // max(1, programs))
    table_rows: list[list[int]] = []
    merges: list[list[int]] = []
    workspace_parts = 0
    for keys, fields in tiles:
        parts = min(MAX_PARTS, -(-keys // part_keys))
        if parts == 1:
            table_rows.append([*fields, 0, 1, 0, 0])
            continue
        table_rows += [[*fields, part, parts, workspace_parts + part, 0] for part in range(parts)]
        merges.append([*fields[:3], workspace_parts, parts, 0, 0, 0])
        workspace_parts += parts
    return Launch(block_m, _to_table(table_rows), _to_table(merges), workspace_parts)


def _to_table(rows: list[list[int]]) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.int32).reshape(-1, TILE_FIELDS)
