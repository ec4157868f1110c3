"""Host memory next to a device that runs late: no reader reads too early."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_map

from canopy_documents.fuse import transfer
from canopy_documents.fuse.cache import KVCache
from canopy_documents.store import host_memory
from canopy_documents.store.chunk import Chunk, PlacedChunk, Shape
from canopy_documents.store.host_memory import HostMemory
from canopy_kernel.rope_scatter import LayersScatter

from support import document_models  # noqa: F401  # isort: skip (it adds their folder to sys.path)
from comparators.plain_model import Rope

from support.separate_device import SeparateDevice, unwrap

STREAM_ORDERS = ("late", "early")


class Streams:
    """Replaces ``torch.cuda`` where streams are used: ``Stream, Event, stream, current_stream``."""

    def __init__(self, order: str) -> None:
        self.runs_early = order == "early"
        self.compute = self.current = Stream(self)

    def Stream(self) -> Stream:
        return Stream(self)

    def Event(self) -> Event:
        return Event(self)

    def current_stream(self) -> Stream:
        return self.current

    @contextlib.contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        previous, self.current = self.current, stream
        yield
        self.current = previous

    def enqueue(self, operation: Callable[[], Any]) -> None:
        """Queue ``operation`` on the current stream."""
        self.current.add(operation)

    def install(self, monkeypatch: Any) -> None:
        import torch

        for name in ("Stream", "Event", "stream", "current_stream"):
            monkeypatch.setattr(torch.cuda, name, getattr(self, name))


class Stream:
    """A queue of operations, which run when the host waits for them."""

    def __init__(self, streams: Streams) -> None:
        self.streams, self.queue, self.finished_count = streams, [], 0

    def add(self, operation: Callable[[], Any]) -> None:
        self.queue.append(operation)
        if self.streams.runs_early and self is not self.streams.compute:
            self.synchronize()

    def wait_event(self, event: Event) -> None:
        self.add(event.synchronize)

    def wait_stream(self, other: Stream) -> None:
        event = Event(self.streams)
        event.record(other)
        self.wait_event(event)

    def synchronize(self) -> None:
        self.run(len(self.queue))

    def run(self, end: int) -> None:
        while self.finished_count < end:
            self.finished_count += 1
            self.queue[self.finished_count - 1]()


class Event:
    """An event that was never recorded counts as complete, as in CUDA."""

    def __init__(self, streams: Streams) -> None:
        self.streams, self.end = streams, 0
        self.stream: Stream | None = None

    def record(self, stream: Stream | None = None) -> None:
        self.stream = stream or self.streams.current
        self.end = len(self.stream.queue)

    def synchronize(self) -> None:
        if self.stream is not None:
            self.stream.run(self.end)


LAYERS, TOKENS, HEADS, DIM = 3, 5, 2, 4
SHAPE = Shape(LAYERS, 4, HEADS, DIM, 8, 10, 1e-6)
CAPACITY_BYTES = TOKENS * SHAPE.kv_elements_per_token * 4


@pytest.fixture(params=STREAM_ORDERS)
def machine(request, monkeypatch):
    """``streams``, a ``device`` whose copies and kernels are queued on them, and a ``memory``."""
    streams, device = Streams(request.param), SeparateDevice()
    streams.install(monkeypatch)
    device.schedule_copy = streams.enqueue
    monkeypatch.setattr(host_memory, "pinned_tensor", lambda n, dtype: torch.zeros(n, dtype=dtype))
    monkeypatch.setattr(transfer, "launch_ranges", lambda layers, nbytes: [(0, 1), (1, layers)])

    def enqueue_scatter(scatter, first=0, end=LAYERS):
        assert scatter.max_programs, "the transfer would occupy the device"
        names = [field.name for field in dataclasses.fields(scatter)]
        arguments = {name: tree_map(unwrap, getattr(scatter, name)) for name in names}
        streams.enqueue(lambda: LayersScatter(**arguments).reference(first, end))

    monkeypatch.setattr(LayersScatter, "run", enqueue_scatter)
    memory = HostMemory(SHAPE, torch.float32, CAPACITY_BYTES, pin=True)
    with device:
        yield SimpleNamespace(streams=streams, device=device, memory=memory)


def computed_chunk(machine, fill_value: float) -> Chunk:
    """Return a device chunk whose KV is written by a queued operation."""
    kv_shape = (LAYERS, TOKENS, HEADS, DIM)
    k, v = torch.zeros(kv_shape), torch.zeros(kv_shape)
    machine.streams.enqueue(lambda: (k.fill_(fill_value), v.fill_(-fill_value)))
    return Chunk((1,) * TOKENS, machine.device.put(k), machine.device.put(v))


def host_chunk(fill_value: float) -> Chunk:
    kv_shape = (LAYERS, TOKENS, HEADS, DIM)
    return Chunk((1,) * TOKENS, torch.full(kv_shape, fill_value), torch.full(kv_shape, -fill_value))


def send_chunk(machine, chunk):
    """Return a transfer of ``chunk`` into a device pool, and the pool."""
    put = machine.device.put
    pools = [[put(torch.zeros(TOKENS, 1, HEADS, DIM)) for _ in range(LAYERS)] for _ in range(2)]
    cache = KVCache(*pools, put(torch.arange(TOKENS)))
    rope = Rope(put(torch.zeros(DIM // 2)))  # no rotation of keys
    model = SimpleNamespace(rope=rope, shape=SHAPE)
    all_slots = put(torch.arange(TOKENS))
    return transfer.start_transfer(model, [PlacedChunk(chunk, 0)], cache, all_slots), pools


def read_by_layers(machine, sent_chunk, pools) -> list[float]:
    """Return V as a forward reads it at each layer, after the device has run its queue."""
    means = []
    for layer in range(LAYERS):
        sent_chunk.order_after(layer)
        v = unwrap(pools[1][layer])
        machine.streams.enqueue(lambda v=v: means.append(float(v.mean())))
    machine.streams.compute.synchronize()
    return means


def check_copy_to_the_host(machine) -> None:
    chunk = machine.memory.copy_in(computed_chunk(machine, 3.0))
    k, v = chunk.rows(1, torch.arange(TOKENS))
    assert (k == 3).all()
    assert (v == -3).all()


def check_transfer(machine) -> None:
    chunk = machine.memory.copy_in(computed_chunk(machine, 3.0))
    assert read_by_layers(machine, *send_chunk(machine, chunk)) == [-3.0] * LAYERS


def check_slots_of_another(machine, make_other) -> None:
    """A chunk is freed when its transfer is queued, and another takes its slots."""
    chunk = machine.memory.copy_in(computed_chunk(machine, 3.0))
    sent_chunk, pools = send_chunk(machine, chunk)
    sent_chunk.chunks = ()
    del chunk
    assert machine.memory.free_slots == TOKENS
    other_chunk = machine.memory.copy_in(make_other(machine))
    assert read_by_layers(machine, sent_chunk, pools) == [-3.0] * LAYERS
    assert (other_chunk.v == -4).all()


CHECKS = {
    "a copy to the host": check_copy_to_the_host,
    "a transfer": check_transfer,
    "slots for a chunk of the device": lambda m: check_slots_of_another(
        m, lambda m: computed_chunk(m, 4.0)
    ),
    "slots for a chunk of the host": lambda m: check_slots_of_another(m, lambda m: host_chunk(4.0)),
}


@pytest.mark.parametrize("check", CHECKS)
def test_unfinished_writes_are_not_read(machine, check) -> None:
    CHECKS[check](machine)


MISSING_WAITS = {
    "the host for its copy": (host_memory.HostChunk, "_wait", "a copy to the host", "late"),
    "a layer for its rows": (transfer.RowTransfer, "order_after", "a transfer", "late"),
    "a copy for the compute": (Stream, "wait_stream", "a copy to the host", "early"),
    "a copy of the host for the device": (
        HostMemory, "_wait_for_reads", "slots for a chunk of the host", "late",
    ),
}  # fmt: skip
"""By wait: its class, its method, the check that fails without it, the order in which it fails."""


@pytest.mark.parametrize("name", MISSING_WAITS)
def test_a_missing_wait_is_detected(machine, name, monkeypatch) -> None:
    owner, method, check, order = MISSING_WAITS[name]
    if machine.streams.runs_early != (order == "early"):
        pytest.skip("shows in the other order")
    monkeypatch.setattr(owner, method, lambda *_: None)
    with pytest.raises(AssertionError):
        CHECKS[check](machine)
