"""Settings of a session gate."""

from __future__ import annotations

from dataclasses import dataclass

from sglang_canopy import declared
from sglang_canopy.declared import declare_key

OFF, AUTO = "off", "auto"
SWIFT_S = 20.0
"""A client that returns within these seconds of an answer is likely an agent: 65 % of agents' and
2 % of conversations' pauses in traces are shorter."""
AFTER_TOOL = "-after-tool"
"""End of the inferred category of a prompt that ends in a tool's result (``request/sent.py``)."""


@dataclass(frozen=True, slots=True)
class GateSettings:
    """Keys of ``--canopy-session-gate``, and the gate's internal settings."""

    mode: str = declare_key(
        AUTO,
        "Whether agents' sessions are held back while their KV does not fit.",
        choices=(OFF, AUTO),
    )
    always: bool = False
    """Always active, for every session: the baseline of measurements."""
    age_s: float = 60.0
    """Seconds after which no other session may overtake a waiting session."""
    horizon_s: float = 120.0
    """A thinking session is charged by its probability of return within these seconds."""
    turns_ahead: int = 3
    """Turns of likely growth charged to a session, which stays and outgrows its prompt."""
    over_age_s: float = 900.0
    """Interval at which the next session starts without room, if it waited as long."""
    max_sessions: int = 4096
    """Largest number of active sessions, without sessions that have a request."""
    max_paused: int = 1024
    """Largest number of paused sessions."""

    def __post_init__(self) -> None:
        declared.check(self)
