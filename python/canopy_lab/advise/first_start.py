"""From advice to the first start of a server: a plan file, what measures, and what comes then.

The first start changes as little as can be compared: SGLang's own cache, only watched, where LRU is to
be kept; SGLang's order on Canopy's tree, whose policies can be exchanged, where another one is advised.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from canopy_lab.advise.answers import Advice
from sglang_canopy.config.plan_file import ServerPlan

_MADE_BY = {"command": "canopy advise"}


@dataclass(frozen=True, slots=True)
class FirstStart:
    """How to start, and what to do then."""

    plan: ServerPlan
    flags: tuple[str, ...]
    then: str

    def arguments(self, plan: Path | str) -> tuple[str, ...]:
        """What to add to the server's command line; ``plan``: where its file lies."""
        return ("--canopy-plan", str(plan), *self.flags)


def plan_beside(page: Path) -> Path:
    """Where the plan file of the page's advice lies."""
    return page.with_suffix(".plan.json")


def first_start(advice: Advice) -> FirstStart:
    """The first start for this advice."""
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
        f"canopy trial --policy {decision.gain.label} (it asks the server's meter first); if it is "
        f"better: restart with --radix-eviction {decision.flag}. Back: drop the flags.",
    )
