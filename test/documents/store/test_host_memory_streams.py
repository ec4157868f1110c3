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
from canopy_documents.store.chunk import Chunk, Placed, Shape
from canopy_documents.store.host_memory import HostMemory
from canopy_kernel.rope_scatter import LayersScatter

from support import document_models  # noqa: F401  # isort: skip (it finds comparators)
from comparators.plain_model import Rope

from support.separate_device import SeparateDevice, inside

ORDERS = ("late", "early")


class Streams:
    """Stands in for ``torch.cuda`` where streams are used: ``Stream, Event, stream, current_stream``."""

    def __init__(self, order: str) -> None:
        self.early = order == "early"
        self.compute = self.current = Stream(self)

    def Stream(self) -> Stream:
        return Stream(self)

    def Event(self) -> Event:
        return Event(self)

    def current_stream(self) -> Stream:
        return self.current

    @contextlib.contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        yield
        self.current = before

    def later(self, work: Callable[[], Any]) -> None:
        """Queue ``work`` on the current stream."""
        self.current.add(work)

    def install(self, monkeypatch: Any) -> None:
        import torch

        for name in ("Stream", "Event", "stream", "current_stream"):
            monkeypatch.setattr(torch.cuda, name, getattr(self, name))


class Stream:
    def __init__(self, of: Streams) -> None:
        self.of, self.queue, self.done = of, [], 0

    def add(self, work: Callable[[], Any]) -> None:
        self.queue.append(work)
        if self.of.early and self is not self.of.compute:
            self.synchronize()

    def wait_event(self, event: Event) -> None:
        self.add(event.synchronize)

    def wait_stream(self, other: Stream) -> None:
        event = Event(self.of)
        event.record(other)
        self.wait_event(event)

    def synchronize(self) -> None:
        self.run(len(self.queue))

    def run(self, end: int) -> None:
        while self.done < end:
            self.done += 1
            self.queue[self.done - 1]()


class Event:
    """Not recorded it is over, as CUDA's."""

    def __init__(self, of: Streams) -> None:
        self.of, self.end = of, 0
        self.on: Stream | None = None

    def record(self, stream: Stream | None = None) -> None:
        self.on = stream or self.of.current
        self.end = len(self.on.queue)

    def synchronize(self) -> None:
        if self.on is not None:
            self.on.run(self.end)


LAYERS, TOKENS, HEADS, DIM = 3, 5, 2, 4
SHAPE = Shape(LAYERS, 4, HEADS, DIM, 8, 10, 1e-6)
CAPACITY = TOKENS * SHAPE.kv_elements_per_token * 4


@pytest.fixture(params=ORDERS)
def machine(request, monkeypatch):
    """``streams``, a ``device`` whose copies and kernels are queued on them, and a ``memory``."""
    streams, device = Streams(request.param), SeparateDevice()
    streams.install(monkeypatch)
    device.later = streams.later
    monkeypatch.setattr(host_memory, "pinned", lambda size, dtype: torch.zeros(size, dtype=dtype))
    monkeypatch.setattr(transfer, "launches", lambda layers, size: [(0, 1), (1, layers)])

    def run(work, first=0, end=LAYERS):
        assert work.most_programs, "the transfer would occupy the device"
        numbers = {
            f.name: tree_map(inside, getattr(work, f.name)) for f in dataclasses.fields(work)
        }
        streams.later(lambda: LayersScatter(**numbers).reference(first, end))

    monkeypatch.setattr(LayersScatter, "run", run)
    memory = HostMemory(SHAPE, torch.float32, CAPACITY, pin=True)
    with device:
        yield SimpleNamespace(streams=streams, device=device, memory=memory)


def computed(machine, number: float) -> Chunk:
    """Return a device chunk whose KV is written by a queued operation."""
    size = (LAYERS, TOKENS, HEADS, DIM)
    k, v = torch.zeros(size), torch.zeros(size)
    machine.streams.later(lambda: (k.fill_(number), v.fill_(-number)))
    return Chunk((1,) * TOKENS, machine.device.put(k), machine.device.put(v))


def on_host(number: float) -> Chunk:
    size = (LAYERS, TOKENS, HEADS, DIM)
    return Chunk((1,) * TOKENS, torch.full(size, number), torch.full(size, -number))


def sent(machine, held):
    """Return a transfer of all of ``held`` into a device pool, and the pool."""
    put = machine.device.put
    pools = [[put(torch.zeros(TOKENS, 1, HEADS, DIM)) for _ in range(LAYERS)] for _ in range(2)]
    cache = KVCache(*pools, put(torch.arange(TOKENS)))
    rope = Rope(put(torch.zeros(DIM // 2)))  # no rotation of keys
    model = SimpleNamespace(rope=rope, shape=SHAPE)
    every = put(torch.arange(TOKENS))
    return transfer.send(model, [Placed(held, 0)], cache, every), pools


def seen_by_layers(machine, under_way, pools) -> list[float]:
    """Return V as a forward reads it at each layer, after the device has run its queue."""
    means = []
    for layer in range(LAYERS):
        under_way.order_after(layer)
        v = inside(pools[1][layer])
        machine.streams.later(lambda v=v: means.append(float(v.mean())))
    machine.streams.compute.synchronize()
    return means


def check_copy_to_the_host(machine) -> None:
    held = machine.memory.hold(computed(machine, 3.0))
    k, v = held.rows(1, torch.arange(TOKENS))
    assert (k == 3).all()
    assert (v == -3).all()


def check_transfer(machine) -> None:
    held = machine.memory.hold(computed(machine, 3.0))
    assert seen_by_layers(machine, *sent(machine, held)) == [-3.0] * LAYERS


def check_slots_of_another(machine, other) -> None:
    """A chunk is forgotten when its transfer is queued, and another takes its slots."""
    held = machine.memory.hold(computed(machine, 3.0))
    under_way, pools = sent(machine, held)
    under_way.chunks = ()
    del held
    assert machine.memory.free_slots == TOKENS
    later = machine.memory.hold(other(machine))
    assert seen_by_layers(machine, under_way, pools) == [-3.0] * LAYERS
    assert (later.v == -4).all()


CHECKS = {
    "a copy to the host": check_copy_to_the_host,
    "a transfer": check_transfer,
    "slots for a chunk of the device": lambda m: check_slots_of_another(
        m, lambda m: computed(m, 4.0)
    ),
    "slots for a chunk of the host": lambda m: check_slots_of_another(m, lambda m: on_host(4.0)),
}


@pytest.mark.parametrize("name", CHECKS)
def test_unfinished_writes_are_not_read(machine, name) -> None:
    CHECKS[name](machine)


WAITS = {
    "the host for its copy": (host_memory.HostChunk, "_wait", "a copy to the host", "late"),
    "a layer for its rows": (transfer.Transfer, "order_after", "a transfer", "late"),
    "a copy for the compute": (Stream, "wait_stream", "a copy to the host", "early"),
    "a copy of the host for the device": (
        HostMemory, "_wait_for_reads", "slots for a chunk of the host", "late",
    ),
}  # fmt: skip
"""Each wait: its place, the check that fails without it, and the order of events that shows it."""


@pytest.mark.parametrize("name", WAITS)
def test_a_missing_wait_is_detected(machine, name, monkeypatch) -> None:
    where, method, check, order = WAITS[name]
    if machine.streams.early != (order == "early"):
        pytest.skip("shows in the other order")
    monkeypatch.setattr(where, method, lambda *about: None)
    with pytest.raises(AssertionError):
        CHECKS[check](machine)
