"""The store of a server's chunks, and what of it a probe may look at instead of what is slow to read."""

from __future__ import annotations

from collections.abc import Sequence

from sglang_canopy.chunk.disk import DiskChunk
from sglang_canopy.chunk.host_memory import HostChunk, HostMemory
from sglang_canopy.chunk.int8_copy import Int8Copies, Int8Copy
from sglang_canopy.chunk.model import Model
from sglang_canopy.chunk.selectors.query import probed_layers
from sglang_canopy.chunk.server import model_view
from sglang_canopy.chunk.server.options import Options
from sglang_canopy.chunk.server.request import ResolvedChunk
from sglang_canopy.chunk.store import ChunkStore
from sglang_canopy.chunk.suffix import ChunkSuffix


def make_store(model: Model, options: Options) -> ChunkStore:
    """The tiers that a server was given. On ranks that must agree each has a folder of its own."""
    ranked = model.ranks is not None
    return ChunkStore(
        model.identity,
        options.capacity_bytes(),
        model_view.folder_of_rank(options.directory) if ranked else options.directory,
        device=str(model.device),
        keep=model_view.kept_by_all if ranked else list,
        copies=Int8Copies(options.int8_mb << 20) if options.int8_mb else None,
        copied_layers=probed_layers(model.shape.layers),
        memory=_host_memory(model, options),
    )


def _host_memory(model: Model, options: Options) -> HostMemory | None:
    """One allocation for the host tier where the model is on a device; pinned for CUDA."""
    if model.device.type == "cpu" or not options.memory_mb:
        return None
    pin = model.device.type == "cuda"
    return HostMemory(model.shape, model.dtype, options.memory_mb << 20, pin)


def copies_of_slow(
    store: ChunkStore, chunks: Sequence[ResolvedChunk], prefix: int
) -> dict[int, Int8Copy | ChunkSuffix]:
    """By position, the 8-bit copies of chunks that are slow to read: in files, and for a model on a
    device in the host's memory too. ``prefix``: tokens that need no chunk."""
    found: dict[int, Int8Copy | ChunkSuffix] = {}
    for one in chunks:
        slow = isinstance(one.chunk, DiskChunk | HostChunk)
        copy = store.copies.get(one.key) if store.copies is not None and slow else None
        if copy is not None and one.end > prefix:
            skip = max(0, prefix - one.start)
            found[one.start + skip] = ChunkSuffix(copy, skip) if skip else copy
    return found
