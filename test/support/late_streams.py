"""CUDA's streams and events without a device: queued work runs as late, or as early, as allowed.

A stream is a queue. ``late``: it runs only up to the events that are waited for. ``early``: the compute
stream runs late and all other streams at once, so a reader that does not wait for compute reads too
soon. A missing wait gives wrong numbers in one of the two orders.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

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
    def stream(self, one: Stream) -> Iterator[None]:
        before, self.current = self.current, one
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
