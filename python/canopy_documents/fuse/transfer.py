"""Transfers of reused KV from host memory to a pool on a device, in groups of layers, in parallel
with compute.

A separate stream reads only the wanted rows from :class:`~.host_memory.HostMemory`, rotates the
keys and writes them to their slots: all chunks of a prompt together, without intermediate buffers
and without row numbers on the host. A short transfer is one launch for all layers. A long transfer
overlaps the layers' compute (CacheTune, section 4.2): it is split into a few launches, and a probe
or forward waits for a launch's event at the first of its layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from canopy_documents.fuse.cache import KVCache
from canopy_documents.fuse.model import Model
from canopy_documents.store.chunk import PlacedChunk, base_and_skip
from canopy_documents.store.device_copy import to_device
from canopy_documents.store.host_memory import HostChunk, HostMemory
from canopy_kernel.rope_scatter import LayersScatter

LAUNCH_BYTES, MAX_LAUNCHES = 4 << 20, 8
"""Bytes per launch: over PCIe they take ten times as long as the host needs to launch.

There are at most ``MAX_LAUNCHES``, so that compute that follows layer by layer waits for at most
an eighth of the transfer.
"""
MAX_PROGRAMS = 32
"""Bound of a launch, so that its programs, which wait for PCIe, leave the chip to the compute.

Each has 4 KiB or more in flight at head size 128; 54 GB/s at an assumed 1.5 us need 80 KiB.
"""


@dataclass(slots=True)
class RowTransfer:
    """Rows in transfer.

    events: one per layer on a CUDA stream; empty for a synchronous transfer. bytes: size of the
    transfer, K and V of all layers. chunks: referenced until the transfer is complete, so that
    their slots are not reused.
    """

    bytes: int
    chunks: tuple[Any, ...]
    events: list[torch.cuda.Event] = field(default_factory=list)

    def order_after(self, layer: int) -> None:
        """Order later work after the arrival of this layer's rows; the host does not wait."""
        if layer < len(self.events):
            torch.cuda.current_stream().wait_event(self.events[layer])

    def finish(self) -> None:
        """Wait for all layers: the stream's last event covers the others."""
        if self.events:
            self.order_after(len(self.events) - 1)


def start_transfer(
    model: Model, placed: Sequence[PlacedChunk], cache: KVCache, positions: torch.Tensor
) -> RowTransfer | None:
    """Start to write KV of the ``positions [m]`` that are in chunks of a :class:`HostMemory`.

    positions: on the pool's device, distinct. For a position of any other chunk, an arbitrary row
    is written to slot 0, which SGLang reserves for padding. Returns ``None`` if no chunk is in such
    memory.
    """
    bases = [(p, *base_and_skip(p.chunk)) for p in placed]
    host_parts = [(p, chunk, skip) for p, chunk, skip in bases if isinstance(chunk, HostChunk)]
    if not host_parts:
        return None
    memory: HostMemory = host_parts[0][1].memory
    source_slots = torch.full((len(cache),), -1, dtype=torch.long)
    for p, chunk, skip in host_parts:
        end = min(p.end, len(cache))
        source_slots[p.start : end] = chunk.slots[skip : skip + end - p.start]
    device = cache.slots.device
    source = to_device(source_slots, device)[positions]
    slots = torch.where(source >= 0, cache.slots[positions], 0)
    source = source.clamp_min(0)
    table = model.rope.table(positions)
    all_rows = torch.arange(positions.numel(), device=device)
    scatter = LayersScatter(
        [memory.k], [memory.v], [positions.numel()], source, all_rows, slots, table, cache.k, cache.v,
        MAX_PROGRAMS,
    )  # fmt: skip
    layers = model.shape.layers
    transfer_bytes = positions.numel() * layers * 2 * memory.k[0, :1].nbytes
    transfer = RowTransfer(transfer_bytes, tuple(chunk for _, chunk, _ in host_parts))
    if memory.stream is None:
        scatter.run()
        return transfer
    memory.stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(memory.stream):
        for start, end in launch_ranges(layers, transfer_bytes):
            scatter.run(start, end)
            event = torch.cuda.Event()
            event.record()
            transfer.events += [event] * (end - start)
    # The device uses them after Python has dropped its last reference.
    for tensor in (source, slots, table, all_rows, *cache.k, *cache.v):
        tensor.record_stream(memory.stream)
    return transfer


def launch_ranges(layers: int, transfer_bytes: int) -> list[tuple[int, int]]:
    """Split a transfer of ``transfer_bytes`` bytes into launches. Returns the range of layers of each."""
    count = max(1, min(layers, MAX_LAUNCHES, transfer_bytes // LAUNCH_BYTES))
    ends = [layers * (i + 1) // count for i in range(count)]
    return list(zip([0, *ends], ends))
