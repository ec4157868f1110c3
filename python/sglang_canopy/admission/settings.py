"""What a session gate is told."""

from __future__ import annotations

from dataclasses import dataclass

from sglang_canopy import declared
from sglang_canopy.declared import declare_key

OFF, AUTO = "off", "auto"
QUEUE, REJECT = "queue", "reject"


@dataclass(frozen=True, slots=True)
class GateSettings:
    """Keys of ``--canopy-session-gate``, and what the gate goes by beside them."""

    mode: str = declare_key(
        AUTO,
        "Whether agents' sessions are held back while their KV does not fit.",
        choices=(OFF, AUTO),
    )
    held: str = declare_key(
        QUEUE,
        "The first request of a session that may not start yet waits in the queue, or is refused "
        "with status 429 and Retry-After.",
        choices=(QUEUE, REJECT),
    )
    always: bool = False
    """Armed from the start, and for every session: what the measurements are compared with."""
    few: float = 8.0
    """Where fewer sessions of the usual size fit, it arms only when nearly everybody waits."""
    age_s: float = 60.0
    """Seconds after which a waiting session is passed by no other."""
    horizon_s: float = 120.0
    """A session that thinks counts with the probability that it returns within so many seconds."""
    turns_ahead: int = 3
    """The growth of so many turns counts beside a session's tokens, as far as they are likely: a
    session that is let in stays, and outgrows its first prompt."""
    over_age_s: float = 900.0
    """So often the session whose turn it is starts without room, if it has waited as long."""
    max_sessions: int = 4096
    """Sessions under way that are remembered, those with a request not counted."""
    max_absent: int = 1024
    """Sessions remembered that were paused or refused and have not come back yet."""

    def __post_init__(self) -> None:
        declared.check(self)
