"""Which recurrent state of a hybrid model goes next.

A state takes one slot however long its prefix is, and saves what computing from the state above it
would cost. ``worth`` ranks it by what the past says: uses won per second that the slot is held
(``reuse/state_reuse.py``) times what one use saves. ``lru`` is SGLang's order.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Hashable, Iterator
from typing import Any, ClassVar

from sglang_canopy.policy.structures.cells import Cell, Cells
from sglang_canopy.policy.structures.lazy_heap import LazyHeap
from sglang_canopy.records import Leaf, Request
from sglang_canopy.reuse.state_reuse import BRANCH, StateReuse


class State(Leaf):
    """A cached state at the end of a prefix of ``offset`` tokens.

    ``at`` names the place (the hash of the path's last block), ``saves`` is what one use of it
    saves, in the caller's unit.
    """

    __slots__ = ("at", "node", "saves")

    def __init__(self, at: Hashable, tokens: int, now: float) -> None:
        super().__init__(offset=tokens, length=1)
        self.at = at
        self.node: Any = None
        """Where it is in the tree that holds it."""
        self.saves = 0.0
        self.created = self.last_access = now


class StatePolicy(abc.ABC):
    """Ranks the states that are cached. A tree ``drop``s a state before it changes one."""

    name: ClassVar[str]

    def arrive(self, request: Request) -> None:
        """A request came: its path says which places are used again."""

    def make(self, state: State, request: Request, branch: bool) -> None:
        """``request`` left ``state``; ``branch``: not at its end, but where it left another path."""

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
    """SGLang's: the one whose last use, or making, is longest ago."""

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
    """The state that is worth least: reuse by label and age, times what a use saves.

    Savings are put in steps of a half power of two, so that the states of one label and step are
    one queue and a victim costs O(queues), however many states there are. With ``saves`` off every
    use is worth the same; with ``belief`` off every state is as likely to be used.
    """

    name: ClassVar[str] = "worth"

    def __init__(
        self, reuse: StateReuse | None = None, *, saves: bool = True, belief: bool = True
    ) -> None:
        self.reuse = StateReuse() if reuse is None else reuse
        self._saves = saves
        self._cells = Cells("survival" if belief else "recency")
        self._belief = belief
        self._version = 0

    def arrive(self, request: Request) -> None:
        self.reuse.arrive(request.path, request.time)

    def make(self, state: State, request: Request, branch: bool) -> None:
        label = BRANCH if branch else (request.label or request.category)
        self.reuse.make(state.at, label, request.time)

    # rank(state) = uses won per second of its slot, by its label and age, * what a use saves
    # victim = the state of least rank
    def admit(self, state: State, now: float) -> None:
        label = self.reuse.label(state.at)
        step = _half_power(state.saves) if self._saves else 0
        self._cells.push(
            (label, step),
            state,
            lambda: (self.reuse.category(label), 2.0 ** (step / 2)),
        )

    def drop(self, state: State) -> None:
        if state.slot is not None:
            self._cells.remove(state)

    def victim(self, now: float) -> State | None:
        if self._version != self.reuse.version:
            self._version = self.reuse.version
            self._cells.reweigh(self._refit)
        if not self._belief:
            return min(self.states(), key=_least_saved, default=None)
        least = self._cells.least(now)
        return None if least is None else least[1]  # type: ignore[return-value]

    def states(self) -> Iterator[State]:
        return iter(self._cells)  # type: ignore[arg-type]

    def _refit(self, cell: Cell) -> float:
        cell.category = self.reuse.category(cell.key[0])  # type: ignore[index]
        return cell.weight


def _half_power(saves: float) -> int:
    """The step of a saving: equal within a factor of the square root of two."""
    return int(saves * saves).bit_length()


def _least_saved(state: State) -> tuple[float, float]:
    return state.saves, state.last_access


Cost = Callable[[int], float]
"""What computing a prompt's first so many tokens costs."""


def linear_cost(tokens: int) -> float:
    """Every token costs the same."""
    return float(tokens)


ORDERS: dict[str, type[StatePolicy]] = {
    order.name: order for order in (LeastRecentStates, WorthOfStates)
}
"""By the name that a configuration has."""
