"""Eviction orders for the recurrent states of a hybrid model.

A state takes one slot, regardless of its prefix length, and saves the cost of computing from the
state above it. ``worth`` ranks a state by that saving and by its age. ``lru`` is SGLang's order.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterator
from math import sqrt
from typing import Any, ClassVar

from sglang_canopy.policy.structures.lazy_heap import LazyHeap
from sglang_canopy.records import Leaf

_MIN_AGE_S = 1e-3


class State(Leaf):
    """A cached state at the end of a prefix of ``offset`` tokens.

    ``saves``: cost saved by one use, in the caller's unit. ``number``: the number of its node.
    """

    __slots__ = ("node", "saves")

    def __init__(self, tokens: int, now: float, number: int) -> None:
        super().__init__(offset=tokens, length=1, number=number)
        self.node: Any = None
        """Node of the state in its tree."""
        self.saves = 0.0
        self.created = self.last_access = now


class StatePolicy(abc.ABC):
    """Ranks the cached states. A tree calls ``drop`` before it changes a state."""

    name: ClassVar[str]

    @abc.abstractmethod
    def admit(self, state: State, now: float) -> None:
        """Make ``state`` evictable. Never called twice without a ``drop`` between."""

    @abc.abstractmethod
    def drop(self, state: State) -> None:
        """Stop ranking ``state``, which is locked or evicted. Unknown states are ignored."""

    @abc.abstractmethod
    def victim(self, now: float) -> State | None:
        """Return the state to evict next; it stays admitted."""

    @abc.abstractmethod
    def states(self) -> Iterator[State]:
        """Iterate over all admitted states (checks)."""


class LeastRecentStates(StatePolicy):
    """SGLang's order: least recently used or created first."""

    name: ClassVar[str] = "lru"

    def __init__(self) -> None:
        self._heap = LazyHeap()

    def admit(self, state: State, now: float) -> None:
        # A request's matched state is older than the deeper state that it created.
        self._heap.push(state, (state.last_access, state.offset))
        state.slot = self._heap

    def drop(self, state: State) -> None:
        self._heap.discard(state)
        state.slot = None

    def victim(self, now: float) -> State | None:
        return self._heap.least()  # type: ignore[return-value]

    def states(self) -> Iterator[State]:
        return iter(self._heap)  # type: ignore[arg-type]


class WorthOfStates(StatePolicy):
    """Evicts the least saving per use over the square root of age.

    Savings are rounded to half powers of two. The states of one step form a queue by last use, and
    only its oldest can be the victim: a choice costs O(steps) for any number of states.
    """

    name: ClassVar[str] = "worth"

    def __init__(self) -> None:
        self._steps: dict[int, LeastRecentStates] = {}

    def admit(self, state: State, now: float) -> None:
        step = _half_power(state.saves)
        queue = self._steps.get(step)
        if queue is None:
            queue = self._steps[step] = LeastRecentStates()
        queue.admit(state, now)
        state.slot = queue

    def drop(self, state: State) -> None:
        if state.slot is not None:
            state.slot.drop(state)

    # rank(state) = saves / sqrt(seconds since its last use)
    # victim = the state of least rank, among equals the least recent
    def victim(self, now: float) -> State | None:
        least: tuple[float, float, int, int] | None = None
        found: State | None = None
        for step, queue in self._steps.items():
            oldest = queue.victim(now)
            if oldest is None:
                continue
            age_s = max(now - oldest.last_access, _MIN_AGE_S)
            worth = 2.0 ** (step / 2) / sqrt(age_s)
            rank = (worth, oldest.last_access, oldest.offset, oldest.number)
            if least is None or rank < least:
                least, found = rank, oldest
        return found

    def states(self) -> Iterator[State]:
        for queue in self._steps.values():
            yield from queue.states()


def _half_power(saves: float) -> int:
    """Return a logarithmic bucket of a saving; a bucket spans a factor of the square root of two."""
    return int(saves * saves).bit_length()


Cost = Callable[[int], float]
"""Cost of computing a prompt's first ``tokens`` tokens."""


def linear_cost(tokens: int) -> float:
    return float(tokens)


ORDERS: dict[str, type[StatePolicy]] = {
    order.name: order for order in (LeastRecentStates, WorthOfStates)
}
"""Orders by their name in a configuration."""
