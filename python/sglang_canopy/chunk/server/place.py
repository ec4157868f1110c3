"""Writing reused KV to its new place, and reading exact KV out of a pool."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from canopy_kernel import pages
from canopy_kernel.rope_scatter import rope_scatter
from sglang_canopy.chunk.cache import Cache
from sglang_canopy.chunk.chunk import Placed
from sglang_canopy.chunk.model import Model
from sglang_canopy.chunk.rope import rotate_into
from sglang_canopy.chunk.server.ahead import layers_ahead


def place(model: Model, placed: Sequence[Placed], cache: Cache, wanted: torch.Tensor) -> int:
    """Write KV of the ``wanted [n]`` (bool) tokens of chunks into the cache, keys rotated.

    One layer at a time over all chunks together; of a chunk on disk only these tokens are read, a
    layer ahead.
    Returns how many tokens were written. Raises CanopyError for a damaged file.
    """
    parts = []
    for p in placed:
        inside = wanted[p.start : p.end].nonzero()[:, 0]
        if inside.numel():
            parts.append((p.chunk, inside, inside + p.start))
    if not parts:
        return 0
    device = cache.slots.device
    positions = torch.cat([at for _, _, at in parts]).to(device)
    slots = cache.slots[positions]
    table = model.rope.table(positions)
    every = torch.arange(positions.numel(), device=device)
    wanted_rows = [(chunk, inside) for chunk, inside, _ in parts]
    turned = None
    for layer, rows in enumerate(layers_ahead(wanted_rows, model.shape.layers)):
        k = torch.cat([k.to(device) for k, _ in rows])
        v = torch.cat([v.to(device) for _, v in rows])
        if k.is_cuda:
            rope_scatter(k, v, every, every, slots, table, cache.k[layer], cache.v[layer])
        else:
            turned = torch.empty_like(k) if turned is None else turned
            rotate_into(k, table, turned)
            pages.write(cache.k[layer], slots, turned)
            pages.write(cache.v[layer], slots, v)
    return int(positions.numel())


def copy_rows(source: Cache, target: Cache, count: int) -> None:
    """Copy the KV of positions ``0..count`` from one cache to another."""
    if not count:
        return
    positions = torch.arange(count, device=source.slots.device)
    for layer in range(len(source.k)):
        k, v = source.read(layer, positions)
        Cache.write(target, layer, positions, k, v)
