"""What Canopy's hooks take of the scheduler's thread: processor time, by the function hooked.

Reading a thread's clock is a system call, so one call in ``EVERY`` is timed and stands for all of
them; ``CANOPY_TIME_EVERY=1`` times each. What a hook lets SGLang's own function do is SGLang's time.
Rows under ``TREE`` are whole calls of our tree, with what SGLang's tree would do in them too.
"""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable
from typing import Any, TypeVar

M = TypeVar("M", bound=Callable[..., Any])

VARIABLE = "CANOPY_TIME_EVERY"
EVERY = 17
TREE = "radix."
"""How the names of our tree's own methods begin."""


class SeamClock:
    """The calls of one hook."""

    __slots__ = ("calls", "longest_s", "seconds", "thread_s", "timed")

    def __init__(self) -> None:
        self.calls = self.timed = 0
        self.seconds = 0.0
        """Of the calls that were timed."""
        self.longest_s = 0.0
        self.thread_s = 0.0
        """What the thread had taken in all, at the last of them."""

    def add(self, seconds: float, thread_s: float) -> None:
        """A timed call has ended."""
        self.timed += 1
        self.seconds += seconds
        self.longest_s = max(self.longest_s, seconds)
        self.thread_s = thread_s

    def row(self) -> dict[str, Any]:
        """``seconds`` stands for all calls, ``longest_s`` is of those that were timed."""
        seconds = self.seconds * self.calls / max(self.timed, 1)
        return {"calls": self.calls, "seconds": seconds, "longest_s": self.longest_s}


_clocks: dict[str, SeamClock] = {}
_every = max(1, int(os.environ.get(VARIABLE) or EVERY))
"""The first call of each hook is timed, and then one in so many."""


def report() -> dict[str, Any]:
    """``seams``, a row for each hook that has run in this process, and ``thread_s``, the processor
    time of the thread in which they run."""
    clocks = dict(_clocks)
    return {
        "thread_s": max((clock.thread_s for clock in clocks.values()), default=0.0),
        "seams": {name: clock.row() for name, clock in clocks.items() if clock.calls},
    }


@functools.cache
def timed(name: str, hook: Callable[..., Any], around: bool) -> Callable[..., Any]:
    """``hook`` with its time counted under ``name``; the same object for the same hook.

    ``around``: its first argument is SGLang's function, whose time is left out.
    """
    clock = _clocks.setdefault(name, SeamClock())

    @functools.wraps(hook)
    def alone(*args: Any, **kwargs: Any) -> Any:
        clock.calls += 1
        if (clock.calls - 1) % _every:
            return hook(*args, **kwargs)
        begin = time.thread_time()
        try:
            return hook(*args, **kwargs)
        finally:
            end = time.thread_time()
            clock.add(end - begin, end)

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


def of_the_tree(method: M) -> M:
    """A decorator: ``method`` of our tree with its time counted under its name."""
    counted: Any = timed(TREE + method.__name__.strip("_"), method, around=False)
    return counted  # type: ignore[no-any-return]
