"""Measures the CPU time of Canopy's hooks in the scheduler's thread.

Reading the thread clock is a system call, so only one call in ``EVERY`` is timed and the total is
extrapolated; ``CANOPY_TIME_EVERY=1`` times every call. SGLang functions called from a hook do not
count. Rows under ``TREE`` are whole calls of Canopy's tree, including the work of SGLang's tree. A
model's forward inside a hook has a row of its own under ``COMPUTED``, and is not the hook's time.
"""

from __future__ import annotations

import contextlib
import functools
import os
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

M = TypeVar("M", bound=Callable[..., Any])

VARIABLE = "CANOPY_TIME_EVERY"
EVERY = 17
TREE = "radix."
"""Prefix of the rows of our tree's methods."""
COMPUTED = "computed."
"""Prefix of the rows of computation that a hook starts."""


class SeamClock:
    """Call count and CPU time of one hook."""

    __slots__ = ("calls", "longest_s", "seconds", "thread_s", "timed")

    def __init__(self) -> None:
        self.calls = self.timed = 0
        self.seconds = 0.0
        """Total of the timed calls."""
        self.longest_s = 0.0
        self.thread_s = 0.0
        """CPU time of the thread at the latest timed call."""

    def add(self, seconds: float, thread_s: float) -> None:
        self.timed += 1
        self.seconds += seconds
        self.longest_s = max(self.longest_s, seconds)
        self.thread_s = thread_s

    def row(self) -> dict[str, Any]:
        """Return the totals; ``seconds`` is extrapolated to all calls."""
        seconds = self.seconds * self.calls / max(self.timed, 1)
        return {"calls": self.calls, "seconds": seconds, "longest_s": self.longest_s}


def _from_environment() -> int:
    """Return the sampling interval. An invalid variable is ignored: an error at import would keep SGLang
    from loading the plugin."""
    given = os.environ.get(VARIABLE, "")
    return max(1, int(given)) if given.isdecimal() else EVERY


_clocks: dict[str, SeamClock] = {}
_every = _from_environment()
"""Sampling interval; the first call of each hook is always timed."""
_computed_s = 0.0
"""CPU time of all computation, subtracted from the hooks around it."""


def report() -> dict[str, Any]:
    """Return one row per hook called in this process (``seams``) and the thread's CPU time."""
    clocks = dict(_clocks)
    return {
        "thread_s": max((clock.thread_s for clock in clocks.values()), default=0.0),
        "seams": {name: clock.row() for name, clock in clocks.items() if clock.calls},
    }


@contextlib.contextmanager
def computation(name: str) -> Iterator[None]:
    """Count the block, forwards of a model, under ``name`` and not under the hook around it."""
    global _computed_s
    clock = _clocks.setdefault(COMPUTED + name, SeamClock())
    clock.calls += 1
    begin = time.thread_time()
    try:
        yield
    finally:
        end = time.thread_time()
        clock.add(end - begin, end)
        _computed_s += end - begin


@functools.cache
def timed(name: str, hook: Callable[..., Any], around: bool) -> Callable[..., Any]:
    """Wrap ``hook`` to count its CPU time under ``name``; the same hook gives the same object.

    ``around``: the first argument is SGLang's function, whose time is subtracted.
    """
    clock = _clocks.setdefault(name, SeamClock())

    @functools.wraps(hook)
    def alone(*args: Any, **kwargs: Any) -> Any:
        clock.calls += 1
        if (clock.calls - 1) % _every:
            return hook(*args, **kwargs)
        computed_s, begin = _computed_s, time.thread_time()
        try:
            return hook(*args, **kwargs)
        finally:
            end = time.thread_time()
            clock.add(end - begin - (_computed_s - computed_s), end)

    @functools.wraps(hook)
    def with_original(original: Any, *args: Any, **kwargs: Any) -> Any:
        clock.calls += 1
        if (clock.calls - 1) % _every:
            return hook(original, *args, **kwargs)
        theirs = 0.0

        def counted(*given: Any, **named: Any) -> Any:
            nonlocal theirs
            begin = time.thread_time()
            try:
                return original(*given, **named)
            finally:
                theirs += time.thread_time() - begin

        begin = time.thread_time()
        try:
            return hook(counted, *args, **kwargs)
        finally:
            end = time.thread_time()
            clock.add(end - begin - theirs, end)

    return with_original if around else alone


def timed_method(method: M) -> M:
    """Decorate a method of our tree to count its time under its name."""
    counted: Any = timed(TREE + method.__name__.strip("_"), method, around=False)
    return counted  # type: ignore[no-any-return]
