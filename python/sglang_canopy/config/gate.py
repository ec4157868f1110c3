"""The flags of the session gate."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sglang_canopy import declared
from sglang_canopy.admission.settings import AGE_S, MODES, OFF, SHARE, GateSettings
from sglang_canopy.declared import declare
from sglang_canopy.errors import CanopyError

FLAG = "--canopy-session-gate"
NOTE = "_canopy_session_gate"
"""Where the settings are noted on ``ServerArgs``; ``None`` without a gate."""


@dataclass(frozen=True, slots=True)
class GateFlags:
    """The flags of the session gate, as they were typed."""

    mode: str = declare(
        OFF,
        FLAG,
        "What becomes of the first request of a session for which there is no room beside those "
        "under way: it waits in the queue, or is refused with status 429 and Retry-After. For "
        "agents that thrash.",
        choices=MODES,
    )
    share: float | None = declare(
        None,
        f"{FLAG}-share",
        "Most that the footprints of admitted sessions may add up to, as a share of device and "
        "host memory.",
        metavar="SHARE",
        low=0.05,
        high=1.0,
        shown_default=str(SHARE),
    )
    age_s: float | None = declare(
        None,
        f"{FLAG}-age",
        "Seconds after which a waiting session is passed by no other.",
        metavar="SECONDS",
        low=0,
        high=86400,
        shown_default=f"{AGE_S:g}",
    )

    def __post_init__(self) -> None:
        declared.check(self)
        if self.mode == OFF:
            for name in ("share", "age_s"):
                if getattr(self, name) is not None:
                    option = declared.option_of(GateFlags, name)
                    raise CanopyError(f"{option.flag} needs {FLAG}: say queue or reject")


def gate_settings(flags: GateFlags) -> GateSettings | None:
    """What the gate is told; ``None`` where there is none."""
    if flags.mode == OFF:
        return None
    given = {"share": flags.share, "age_s": flags.age_s}
    chosen: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    return GateSettings(mode=flags.mode, **chosen)
