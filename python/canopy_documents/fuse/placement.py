"""Write reused KV to its new positions, with keys rotated to them.

The engine, calibration and the server all use this code.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from canopy_documents.fuse.cache import KVCache
from canopy_documents.fuse.model import Model
from canopy_documents.fuse.rope import rotate_into
from canopy_documents.fuse.transfer import start_transfer
from canopy_documents.store.chunk import Chunk, ChunkSuffix, PlacedChunk, base_and_skip
from canopy_documents.store.device_copy import is_host, to_device
from canopy_documents.store.host_memory import HostChunk
from canopy_kernel import pages
from canopy_kernel.rope_scatter import scatter_of_layer
from canopy_kernel.rows import rotation_factors

StoredChunk = Chunk | HostChunk | ChunkSuffix

_ChunkRows = tuple[StoredChunk, torch.Tensor, torch.Tensor]
"""A chunk, indices of some of its tokens, and their positions in the prompt."""


def place_chunks(
    model: Model, placed: Sequence[PlacedChunk], cache: KVCache, needed: torch.Tensor
) -> None:
    """Write KV of the ``needed [n]`` (bool) tokens of chunks into the cache, keys rotated.

    On a CPU, a chunk is written whole into a contiguous cache: the other rows will be computed and
    overwritten, and one long write costs less than picking rows. On a device see
    :func:`_place_on_device`.
    """
    if not is_host(cache.slots):
        _place_on_device(model, placed, cache, needed)
        return
    contiguous = cache.has_identity_slots
    rows = []
    for p in placed:
        indices = needed[p.start : p.end].nonzero()[:, 0]
        if not indices.numel():
            continue
        if contiguous and isinstance(p.chunk, Chunk):
            _write_whole(model, p, cache)
        else:
            rows.append((p.chunk, indices, indices + p.start))
    if rows:
        _write_rows(model, rows, cache)


def _write_whole(model: Model, placed: PlacedChunk, cache: KVCache) -> None:
    span = slice(placed.start, placed.end)
    table = model.rope.table(torch.arange(placed.start, placed.end))
    factors = rotation_factors(table, model.shape.kv_heads)
    for layer in range(model.shape.layers):
        rotate_into(placed.chunk.raw_k[layer], factors, cache.k[layer][span, 0])
        cache.v[layer][span, 0].copy_(placed.chunk.v[layer])


def _write_rows(model: Model, rows: Sequence[_ChunkRows], cache: KVCache) -> None:
    """Write all chunks together, one layer at a time."""
    positions = torch.cat([row_positions for _, _, row_positions in rows])
    slots = cache.slots[positions]
    factors = rotation_factors(model.rope.table(positions), model.shape.kv_heads)
    rotated = None
    for layer in range(model.shape.layers):
        read = [chunk.rows(layer, indices) for chunk, indices, _ in rows]
        k, v = torch.cat([k for k, _ in read]), torch.cat([v for _, v in read])
        rotated = torch.empty_like(k) if rotated is None else rotated
        rotate_into(k, factors, rotated)
        pages.write(cache.k[layer], slots, rotated)
        pages.write(cache.v[layer], slots, v)


def _place_on_device(
    model: Model, placed: Sequence[PlacedChunk], cache: KVCache, needed: torch.Tensor
) -> None:
    """:func:`place_chunks` for a pool on a device.

    Chunks in :class:`HostMemory` are sent through ``cache.transfers``, without waiting for the
    device; of others the needed rows are copied layer by layer.
    """
    device = cache.slots.device
    transfer = start_transfer(model, placed, cache, to_device(needed.nonzero()[:, 0], device))
    if transfer is not None:
        cache.transfers.append(transfer)
    parts: list[_Part] = []
    for p in placed:
        indices = needed[p.start : p.end].nonzero()[:, 0]
        if indices.numel() and not isinstance(base_and_skip(p.chunk)[0], HostChunk):
            parts.append((p, indices, cache.slots[to_device(indices + p.start, device)]))
    if parts:
        _place_by_layer(model, parts, cache)


_Part = tuple[PlacedChunk, torch.Tensor, torch.Tensor]
"""A placed chunk, indices of some of its tokens (on the host), and their slots."""


def _place_by_layer(model: Model, parts: Sequence[_Part], cache: KVCache) -> None:
    """Place one layer at a time."""
    locations = _locations(model, parts, cache)
    for layer in range(model.shape.layers):
        read = [p.chunk.rows(layer, indices) for p, indices, _ in parts]
        keys, values = ([to_device(x, cache.slots.device) for x in rows] for rows in zip(*read))
        scatter_of_layer(keys, values, *locations, cache.k[layer], cache.v[layer]).run()


def _locations(
    model: Model, parts: Sequence[_Part], cache: KVCache
) -> tuple[list[int], torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return (tokens per part, source rows, cos/sin table indices, pool slots, cos/sin table)."""
    device = cache.slots.device
    counts = [indices.numel() for _, indices, _ in parts]
    positions = torch.cat([indices + p.start for p, indices, _ in parts])
    rows = torch.cat([torch.arange(n) for n in counts])
    table_rows = torch.arange(len(positions), device=device)
    slots = torch.cat([part_slots for *_, part_slots in parts])
    table = model.rope.table(to_device(positions, device))
    return counts, to_device(rows, device), table_rows, slots, table


def copy_positions(source: KVCache, target: KVCache, count: int) -> None:
    """Copy the KV of positions ``0..count`` from one cache to another."""
    if not count:
        return
    positions = torch.arange(count, device=source.slots.device)
    for layer in range(len(source.k)):
        k, v = source.read(layer, positions)
        KVCache.write(target, layer, positions, k, v)
