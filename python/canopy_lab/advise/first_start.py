"""The first start of a server after advice: its plan file, its flags and the next step.

The first start changes little. If LRU is advised, SGLang's own cache runs and Canopy
observes. If another policy is advised, Canopy's tree runs LRU, and the policy can be exchanged later.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from canopy_lab.advise.answers import Advice
from sglang_canopy.config.plan_file import ServerPlan

_MADE_BY = {"command": "canopy advise"}


@dataclass(frozen=True, slots=True)
class FirstStart:
    """Plan, flags and the next step."""

    plan: ServerPlan
    flags: tuple[str, ...]
    then: str

    def arguments(self, plan: Path | str) -> tuple[str, ...]:
        """Return the arguments for the server's command line. ``plan``: path of the plan file."""
        return ("--canopy-plan", str(plan), *self.flags)


def plan_beside(page: Path) -> Path:
    """Return the path of the plan file that belongs to a page."""
    return page.with_suffix(".plan.json")


def first_start(advice: Advice) -> FirstStart:
    decision = advice.decision
    made_by = {**_MADE_BY, "advice": decision.sentence, "capacity_tokens": advice.capacity_tokens}
    if decision.gain is None:
        return FirstStart(
            ServerPlan(radix_eviction="lru", made_by=made_by),
            ("--canopy-observe",),
            "see /canopy/ui on the server: its first line reports a possible gain.",
        )
    plan = ServerPlan(radix_eviction="canopy-lru", made_by=made_by)
    flags = ("--canopy-whatif", "auto,floor=off")
    if decision.flag == "canopy-lru":
        return FirstStart(
            plan, flags, "canopy-lru ranks; /canopy/ui shows what other policies would hit."
        )
    return FirstStart(
        plan,
        flags,
        f"see /canopy/ui: if the server's meter agrees, restart with --radix-eviction {decision.flag}. "
        "Back: drop the flags.",
    )
