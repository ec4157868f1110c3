"""Reused KV travels from the host's memory to a pool on a device, some layers at a time, beside the compute.

A stream of its own reads exactly the wanted rows out of :class:`~.host_memory.HostMemory`, turns the
keys and writes them where they go: all chunks of a prompt together, without buffers between and
without the host knowing the rows. A short transfer is one launch for all layers; a long one, which is
to run beside the layers' compute (CacheTune, section 4.2), is a few, each with an event that a probe
or a forward waits for when it is at the first of these layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from canopy_chunks.fuse.cache import KVCache
from canopy_chunks.fuse.model import Model
from canopy_chunks.store.chunk import Placed
from canopy_chunks.store.device_copy import to_device
from canopy_chunks.store.host_memory import HostChunk, HostMemory
from canopy_chunks.store.suffix import base_and_skip
from canopy_kernel.rope_scatter import LayersScatter

LAUNCH_BYTES, MOST_LAUNCHES = 4 << 20, 8
"""A launch for so many bytes: over PCIe they take ten times as long as it takes the host. But no more
launches than this, so that a compute that follows layer by layer waits for an eighth of it at most."""


@dataclass(slots=True)
class Transfer:
    """Rows under way. ``events``: of each layer, on a CUDA stream; none where nothing is asynchronous.

    bytes: how much travels, K and V of all layers. chunks: held until the transfer is over, so that
    their slots are not given to others.
    """

    bytes: int
    chunks: tuple[Any, ...]
    events: list[torch.cuda.Event] = field(default_factory=list)

    def arrive(self, layer: int) -> None:
        """What is queued from here on runs when this layer's rows are in place; no host waits."""
        if layer < len(self.events):
            torch.cuda.current_stream().wait_event(self.events[layer])

    def finish(self) -> None:
        """As :meth:`arrive`, for all layers: the last of the stream's events covers the others."""
        if self.events:
            self.arrive(len(self.events) - 1)


def send(
    model: Model, placed: Sequence[Placed], cache: KVCache, positions: torch.Tensor
) -> Transfer | None:
    """Begin to write KV of those of ``positions [m]`` that lie in chunks of a :class:`HostMemory`.

    positions: on the pool's device, distinct. A position of another chunk is written from any row to
    slot 0, which SGLang keeps for padding. ``None`` where no chunk is in such memory.
    """
    based = [(p, *base_of(p.chunk)) for p in placed]
    parts = [(p, chunk, skip) for p, chunk, skip in based if chunk is not None]
    if not parts:
        return None
    memory: HostMemory = parts[0][1].memory
    lies = torch.full((len(cache),), -1, dtype=torch.long)
    for p, chunk, skip in parts:
        end = min(p.end, len(cache))
        lies[p.start : end] = chunk.slots[skip : skip + end - p.start]
    device = cache.slots.device
    source = to_device(lies, device)[positions]
    slots = torch.where(source >= 0, cache.slots[positions], 0)
    source = source.clamp_min(0)
    table = model.rope.table(positions)
    every = torch.arange(positions.numel(), device=device)
    scatter = LayersScatter(
        [memory.k], [memory.v], [positions.numel()], source, every, slots, table, cache.k, cache.v
    )  # fmt: skip
    layers = model.shape.layers
    size = positions.numel() * layers * 2 * memory.k[0, :1].nbytes
    sent = Transfer(size, tuple(chunk for _, chunk, _ in parts))
    if memory.stream is None:
        scatter.run()
        return sent
    memory.stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(memory.stream):
        for first, end in launches(layers, size):
            scatter.run(first, end)
            event = torch.cuda.Event()
            event.record()
            sent.events += [event] * (end - first)
    for x in (source, slots, table, every, *cache.k, *cache.v):  # used beyond their last name here
        x.record_stream(memory.stream)
    return sent


def launches(layers: int, size: int) -> list[tuple[int, int]]:
    """Layers, from the first to before the second, of each launch of a transfer of ``size`` bytes."""
    count = max(1, min(layers, MOST_LAUNCHES, size // LAUNCH_BYTES))
    ends = [layers * (i + 1) // count for i in range(count)]
    return list(zip([0, *ends], ends))


def base_of(chunk: Any) -> tuple[HostChunk | None, int]:
    """The chunk in the host's memory that this is, or is the rest of, and where it begins there."""
    base, skip = base_and_skip(chunk)
    return (base, skip) if isinstance(base, HostChunk) else (None, 0)
