"""Which recurrent state of a hybrid model goes next.

A state takes one slot however long its prefix is, and saves what computing from the state above it
would cost. ``worth`` ranks it by that saving and by its age. ``lru`` is SGLang's order.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterator
from math import sqrt
from typing import Any, ClassVar

from sglang_canopy.policy.structures.lazy_heap import LazyHeap
from sglang_canopy.records import Leaf

_LEAST_AGE_S = 1e-3


class State(Leaf):
    """A cached state at the end of a prefix of ``offset`` tokens.

    ``saves`` is what one use of it saves, in the caller's unit. ``number``: that of its node.
    """

    __slots__ = ("node", "saves")

    def __init__(self, tokens: int, now: float, number: int) -> None:
        super().__init__(offset=tokens, length=1, number=number)
        self.node: Any = None
        """Where it is in the tree that holds it."""
        self.saves = 0.0
        self.created = self.last_access = now


class StatePolicy(abc.ABC):
    """Ranks the states that are cached. A tree ``drop``s a state before it changes one."""

    name: ClassVar[str]

    @abc.abstractmethod
    def admit(self, state: State, now: float) -> None:
        """``state`` may go. Not twice without a ``drop`` between."""

    @abc.abstractmethod
    def drop(self, state: State) -> None:
        """``state`` may not go now, or is gone. Unknown ones are ignored."""

    @abc.abstractmethod
    def victim(self, now: float) -> State | None:
        """The state to evict next; it stays admitted."""

    @abc.abstractmethod
    def states(self) -> Iterator[State]:
        """Every admitted state (checks)."""


class LeastRecentStates(StatePolicy):
    """SGLang's order: the state whose last use, or creation, is longest ago."""

    name: ClassVar[str] = "lru"

    def __init__(self) -> None:
        self._heap = LazyHeap()

    def admit(self, state: State, now: float) -> None:
        # Of one request the state that it used is older than the deeper one that it left.
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
    """What a use of the state saves, over the square root of its age: the least goes first.

    Savings are put in steps of a half power of two. The states of one step are a queue by last use,
    of which only the oldest can be the victim: a choice costs O(steps), however many states there are.
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
            age_s = max(now - oldest.last_access, _LEAST_AGE_S)
            worth = 2.0 ** (step / 2) / sqrt(age_s)
            rank = (worth, oldest.last_access, oldest.offset, oldest.number)
            if least is None or rank < least:
                least, found = rank, oldest
        return found

    def states(self) -> Iterator[State]:
        for queue in self._steps.values():
            yield from queue.states()


def _half_power(saves: float) -> int:
    """The step of a saving: equal within a factor of the square root of two."""
    return int(saves * saves).bit_length()


Cost = Callable[[int], float]
"""What computing a prompt's first so many tokens costs."""


def linear_cost(tokens: int) -> float:
    """Every token costs the same."""
    return float(tokens)


ORDERS: dict[str, type[StatePolicy]] = {
    order.name: order for order in (LeastRecentStates, WorthOfStates)
}
"""By the name that a configuration has."""
