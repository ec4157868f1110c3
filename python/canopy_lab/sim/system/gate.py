"""The door of an instance: which turns may join its queue, and which wait before it.

To add a gate, write a class with ``enter``, ``ended`` and ``wake_at`` and name it in
``SESSION_GATES``; ``SystemConfig`` takes the name as ``session_gate`` and the class's arguments,
but for the two capacities, as ``session_gate_config``.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from sglang_canopy.admission import gate as admission
from sglang_canopy.admission.capacity import capacity_tokens
from sglang_canopy.admission.settings import GateSettings
from sglang_canopy.records import Request


@dataclass(frozen=True, slots=True)
class Turn:
    """One request at the door."""

    number: int
    """Its ordinal in the trace, from 0."""
    session: Hashable | None
    """Its conversation; ``None`` where the trace names none."""
    tenant: str | None
    prompt_tokens: int
    due_s: float
    """When it came."""
    request: Request
    """As policies see it; ``output_tokens`` and ``stop`` are known when it has ended."""


class SessionGate(Protocol):
    """Asked before a turn joins the queue of one instance. One object an instance."""

    def enter(self, turn: Turn, now: float) -> bool:
        """Whether ``turn`` may join the queue ``now``.

        Asked when it comes. A refused turn is kept, its wait counts as part of its TTFT, and it
        is asked again, those longest at the door first, whenever a turn has ended and when
        ``wake_at`` is reached.
        """

    def ended(self, turn: Turn, tokens: int, now: float) -> None:
        """A turn that had entered is answered; its path has ``tokens`` now."""

    def wake_at(self, now: float) -> float:
        """When those at the door should be asked again though nothing ended; infinity: never.

        A gate that refuses while nothing runs must name a time, or they wait for ever, which
        raises ``CanopyError`` at the end of the run.
        """

    def seniority(self, number: int) -> int | None:
        """Where a turn that has entered comes among the others, lowest first, before the queue's
        own order; ``None`` while the gate does not care."""


class OpenGate:
    """``none``: everyone enters."""

    def __init__(self, device_tokens: int, host_tokens: int) -> None:
        pass

    def enter(self, turn: Turn, now: float) -> bool:
        return True

    def ended(self, turn: Turn, tokens: int, now: float) -> None:
        pass

    def wake_at(self, now: float) -> float:
        return math.inf

    def seniority(self, number: int) -> int | None:
        return None


class StaticCap:
    """``static``: at most ``sessions`` turns inside at once; the placebo of every other gate.

    A session counts from its first turn until ``idle_s`` after its last answer.
    """

    def __init__(
        self, device_tokens: int, host_tokens: int, sessions: int = 12, idle_s: float = 120.0
    ) -> None:
        self.sessions = sessions
        self.idle_s = idle_s
        self._until: dict[Hashable, float] = {}
        """Sessions inside, and when each is forgotten; infinity while a turn runs."""

    def enter(self, turn: Turn, now: float) -> bool:
        session = turn.number if turn.session is None else turn.session
        for name in [s for s, until in self._until.items() if until <= now]:
            del self._until[name]
        if session not in self._until and len(self._until) >= self.sessions:
            return False
        self._until[session] = math.inf
        return True

    def ended(self, turn: Turn, tokens: int, now: float) -> None:
        if turn.session is None:
            del self._until[turn.number]
        else:
            self._until[turn.session] = now + self.idle_s

    def wake_at(self, now: float) -> float:
        return min(self._until.values(), default=now)

    def seniority(self, number: int) -> int | None:
        return None


class RandomCap(StaticCap):
    """``random``: the same number of sessions, but a free place goes to any that waits."""

    def __init__(
        self,
        device_tokens: int,
        host_tokens: int,
        sessions: int = 12,
        idle_s: float = 120.0,
        seed: int = 0,
    ) -> None:
        super().__init__(device_tokens, host_tokens, sessions, idle_s)
        self._draw = random.Random(seed)
        self._refused: dict[int, Turn] = {}
        self._chosen: int | None = None

    def enter(self, turn: Turn, now: float) -> bool:
        if turn.session in self._until:
            return super().enter(turn, now)
        self._refused.setdefault(turn.number, turn)
        if self._chosen is None:
            self._chosen = self._draw.choice(list(self._refused))
        if turn.number != self._chosen or not super().enter(turn, now):
            return False
        del self._refused[turn.number]
        self._chosen = None
        return True

    def wake_at(self, now: float) -> float:
        free = sum(until > now for until in self._until.values()) < self.sessions
        return now if free else super().wake_at(now)


class Footprint:
    """``footprint``: the gate of a server with ``--canopy-session-gate auto``, the same object.

    ``exclusive``: whether the host holds what the device does not (copies at eviction). ``config``:
    of ``GateSettings``.
    """

    def __init__(
        self, device_tokens: int, host_tokens: int, exclusive: bool = False, **config: Any
    ) -> None:
        capacity = capacity_tokens(device_tokens, host_tokens, exclusive=exclusive)
        self.gate = admission.SessionGate(GateSettings(**config), capacity)
        self._arrived: set[int] = set()

    def enter(self, turn: Turn, now: float) -> bool:
        if turn.number not in self._arrived:
            self._arrived.add(turn.number)
            self.gate.arrive(turn.number, turn.request)
        self.gate.advance(now)
        return not self.gate.holds(turn.number)

    def ended(self, turn: Turn, tokens: int, now: float) -> None:
        self._arrived.discard(turn.number)
        self.gate.finish(turn.number, turn.request)
        self.gate.advance(now)

    def wake_at(self, now: float) -> float:
        return self.gate.refresh_due_s

    def seniority(self, number: int) -> int | None:
        return self.gate.seniority(number) if self.gate.pressed else None


SESSION_GATES: Mapping[str, Callable[..., SessionGate]] = {
    "none": OpenGate,
    "static": StaticCap,
    "random": RandomCap,
    "footprint": Footprint,
}
"""By the name that ``SystemConfig.session_gate`` takes."""


def make_session_gate(
    name: str, device_tokens: int, host_tokens: int, config: Mapping[str, Any]
) -> SessionGate:
    """The gate of that name; raises ``KeyError`` or ``TypeError``."""
    return SESSION_GATES[name](device_tokens, host_tokens, **config)
