"""The first start of a server after advice: its flags and the next step.

The first start changes little. If LRU is advised, SGLang's own cache runs and Canopy observes. If
another policy is advised, Canopy's tree runs LRU, and the meter measures the others.
"""

from __future__ import annotations

from dataclasses import dataclass

from canopy_lab.advise.answers import Advice


@dataclass(frozen=True, slots=True)
class FirstStart:
    """Flags and the next step."""

    flags: tuple[str, ...]
    then: str


def first_start(advice: Advice) -> FirstStart:
    decision = advice.decision
    if decision.gain is None:
        return FirstStart(
            ("--canopy-observe",),
            "see /canopy/ui on the server: its first line reports a possible gain.",
        )
    flags = ("--radix-eviction", "canopy-lru", "--canopy-whatif", "auto,floor=off")
    if decision.flag == "canopy-lru":
        return FirstStart(
            flags, "canopy-lru ranks; /canopy/ui shows what other policies would hit."
        )
    return FirstStart(
        flags,
        f"see /canopy/ui: if the server's meter agrees, restart with --radix-eviction {decision.flag}. "
        "Back: drop the flags.",
    )
