"""Session gates of an instance: decide which turns may join its queue.

To add a gate, implement ``SessionGate`` and list the class in ``SESSION_GATES``. ``SystemConfig``
takes its name as ``session_gate`` and its arguments, without the capacities, as
``session_gate_config``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from sglang_canopy.admission import gate as admission
from sglang_canopy.admission.activation import GateSettings
from sglang_canopy.admission.footprint import capacity_tokens
from sglang_canopy.records import Request


@dataclass(frozen=True, slots=True)
class Turn:
    """One request at the gate."""

    number: int
    """Index in the trace, from 0."""
    session: Hashable | None
    """Conversation; ``None`` if the trace has none."""
    tenant: str | None
    prompt_tokens: int
    due_s: float
    """Arrival time."""
    request: Request
    """The policies' request; ``output_tokens`` and ``stop`` are set at its end."""


class SessionGate(Protocol):
    """Admits turns to the queue of one instance; one object per instance."""

    def enter(self, turn: Turn, now: float) -> bool:
        """Return True if ``turn`` may join the queue at ``now``.

        Called on arrival. Refused turns are held, which counts in their TTFT, and offered again,
        oldest first, after each end of a turn and at ``wake_at``.
        """

    def ended(self, turn: Turn, tokens: int, now: float) -> None:
        """Report the end of an admitted turn, whose path is ``tokens`` long."""

    def wake_at(self, now: float) -> float:
        """Return the time to offer held turns again without an end; infinity: never.

        A gate that holds turns while none runs must return a time. Otherwise the run ends with a
        ``CanopyError``.
        """

    def seniority(self, number: int) -> int | None:
        """Return an admitted turn's rank, lowest first, which precedes the queue's order;
        ``None`` for no preference."""


class OpenGate:
    """``none``: admits every turn."""

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


class Footprint:
    """``footprint``: the server's own gate, as with ``--canopy-session-gate auto``.

    ``exclusive``: the host holds only tokens that the device does not (``write_back``). ``config``:
    fields of ``GateSettings``.
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
        return self.gate.seniority(number) if self.gate.has_waiting_sessions else None


SESSION_GATES: dict[str, Callable[..., SessionGate]] = {"none": OpenGate, "footprint": Footprint}
"""Gates by their name in ``SystemConfig.session_gate``."""


def make_session_gate(
    name: str, device_tokens: int, host_tokens: int, config: Mapping[str, Any]
) -> SessionGate:
    """Make a gate by name. Raises ``KeyError`` or ``TypeError``."""
    return SESSION_GATES[name](device_tokens, host_tokens, **config)
