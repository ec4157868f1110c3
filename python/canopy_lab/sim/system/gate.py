"""Session gates of an instance: decide which turns may join its queue.

To add a gate, derive it from ``OpenGate`` and list the class in ``SESSION_GATES``. ``SystemConfig``
takes its name as ``session_gate`` and its arguments, without the capacities, as
``session_gate_config``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from sglang_canopy.admission import gate as admission
from sglang_canopy.admission.activation import GateSettings
from sglang_canopy.records import Request


class OpenGate:
    """``none``: admits every turn to the queue of one instance. ``number``: index in the trace."""

    def __init__(self, device_tokens: int, host_tokens: int) -> None:
        pass

    def enter(self, number: int, request: Request, now: float) -> bool:
        """Return True if the turn may join the queue at ``now``.

        Called on arrival. Refused turns are held, which counts in their TTFT, and offered again,
        oldest first, after each end of a turn and at ``wake_at``.
        """
        return True

    def record_end(self, number: int, request: Request, now: float) -> None:
        """Report the end of an admitted turn; ``output_tokens`` and ``stop`` are set."""

    def wake_at(self, now: float) -> float:
        """Return the time to offer held turns again without an end; infinity: never.

        A gate that holds turns while none runs must return a time. Otherwise the run ends with a
        ``CanopyError``.
        """
        return math.inf

    def seniority(self, number: int) -> int | None:
        """Return a rank, lowest first, that precedes the queue's order; ``None``: no preference."""
        return None


class FootprintGate(OpenGate):
    """``footprint``: the server's own gate, as with ``--canopy-session-gate auto``.

    ``exclusive``: the host holds only tokens that the device does not (``write_back``). ``config``:
    fields of ``GateSettings``.
    """

    def __init__(
        self, device_tokens: int, host_tokens: int, exclusive: bool = False, **config: Any
    ) -> None:
        tiers = device_tokens, host_tokens
        capacity_tokens = sum(tiers) if exclusive else max(tiers)  # without it the host has copies
        self.gate = admission.SessionGate(GateSettings(**config), capacity_tokens)
        self._session_by_turn: dict[int, int] = {}
        """Turns that wait or are answered: number -> number of the session."""

    def enter(self, number: int, request: Request, now: float) -> bool:
        if number not in self._session_by_turn:
            self._session_by_turn[number] = self.gate.arrive(number, request).number
        self.gate.advance(now)
        return not self.gate.holds(number)

    def record_end(self, number: int, request: Request, now: float) -> None:
        self._session_by_turn.pop(number, None)
        self.gate.finish(number, request)
        self.gate.advance(now)

    def wake_at(self, now: float) -> float:
        return self.gate.refresh_due_s

    def seniority(self, number: int) -> int | None:
        return self._session_by_turn.get(number, -1) if self.gate.waiting else None


SESSION_GATES: dict[str, Callable[..., OpenGate]] = {"none": OpenGate, "footprint": FootprintGate}
"""Gates by their name in ``SystemConfig.session_gate``."""


def make_session_gate(
    name: str, device_tokens: int, host_tokens: int, config: Mapping[str, Any]
) -> OpenGate:
    """Make a gate by name. Raises ``KeyError`` or ``TypeError``."""
    return SESSION_GATES[name](device_tokens, host_tokens, **config)
