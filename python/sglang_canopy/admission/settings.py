"""What a session gate is told."""

from __future__ import annotations

from dataclasses import dataclass

from sglang_canopy import declared
from sglang_canopy.declared import declare_key

OFF, QUEUE, REJECT = "off", "queue", "reject"
MODES = (OFF, QUEUE, REJECT)
SHARE = 0.95
AGE_S = 60.0


@dataclass(frozen=True, slots=True)
class GateSettings:
    """Keys of ``--canopy-session-gate``, and what the gate goes by beside them."""

    mode: str = declare_key(
        QUEUE,
        "What becomes of a request whose session may not start yet: it waits, or is refused.",
        choices=MODES,
    )
    share: float = declare_key(
        SHARE,
        "Most that the footprints of admitted sessions may add up to, as a share of device and "
        "host memory.",
        low=0.05,
        high=1.0,
    )
    excess: float = 1.2
    """While sessions wait and those under way find what they left, footprints may grow to this
    multiple of it."""
    age_s: float = declare_key(
        AGE_S,
        "Seconds after which a waiting session is passed by no other.",
        low=0,
        high=86400,
    )
    horizon_s: float = 120.0
    """A session that thinks counts with the probability that it returns within so many seconds."""
    turns_ahead: int = 20
    """The growth of so many turns counts beside a session's tokens, as far as they are likely: a
    session that is let in stays, and outgrows its first prompt."""
    over_age_s: float = 900.0
    """After so many seconds one waiting session may start without room; the next one only when the
    footprints are within the budget again."""
    tenant_floor: float = 0.25
    """Share of the budget that a tenant's sessions keep whatever other tenants ask for."""
    max_sessions: int = 4096
    """Sessions remembered, waiting requests not counted."""
    max_refused: int = 1024
    """Refused sessions whose place in the line is kept."""

    def __post_init__(self) -> None:
        declared.check(self)
