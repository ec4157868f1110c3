"""Live quality: find tenants whose answers differ too often from full recompute, and limit their
reuse.

Some of a tenant's fused prompts are decoded both ways (:mod:`.checker`). For each, Page's cumulative
sum (Biometrika 41, 1954) adds the difference (0 or 1) minus the allowed share: a fault accumulates,
chance does not. At ``ALARM`` the tenant's ratio is raised; if that does not help, its reuse stops.
The opposite sum, over checks at the previous level, undoes this. Each tenant has its own sums, so
one tenant cannot stop another's reuse. No decision depends on a clock or a random number, so all
ranks decide alike.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

SERVED, RAISED, STOPPED = range(3)
LEVELS = ("served", "raised", "stopped")
"""Reuse of a tenant's prompts: at the server's ratio, at a higher ratio, or none."""
EVERY = 100
"""Fused prompts of a tenant for one check: its answers are compared in idle time."""
ALLOWED = 0.4
"""Share of a tenant's checked answers that may differ: greedy answers flip at near ties."""
ALARM = 4.0 - 1e-9
"""Sum at which a tenant's level changes, with a margin for rounding."""
IN_DOUBT = 10
"""Factor on the checked share of a tenant that is new, differed recently, or is limited."""
FIRST_CHECKS = 8
"""Checks after which a tenant is no longer new."""
MIN_GAIN = 0.1
"""Smallest credit of an equal answer towards returning to the previous level."""
MAX_TENANTS = 1024
LOWEST_RAISED = 0.3
TIE_NATS = 0.5
"""Largest preference, in nats, of full recompute for its own token at which two answers still count
as equal.

Compared at the first difference; the other token is then nearly as likely (0.6 times).
"""


def raised_ratio(ratio: float) -> float:
    """Return the ratio of a tenant at ``RAISED``."""
    return min(1.0, max(2 * ratio, LOWEST_RAISED))


def ratio_at(level: int, ratio: float) -> float:
    """Return the ratio of a tenant at ``level`` for the server's ``ratio``."""
    return raised_ratio(ratio) if level >= RAISED else ratio


@dataclass(slots=True)
class TenantQuality:
    """One tenant's checks.

    offered: number of its prompts. since: prompts since the last selected for a check. above,
    below: cumulative sums of the excess of differences at its level, and of their deficit at the
    previous level.
    """

    level: int = SERVED
    offered: int = 0
    since: int = 0
    checked: int = 0
    differed: int = 0
    above: float = 0.0
    below: float = 0.0
    turn: bool = False

    @property
    def suspect(self) -> bool:
        """Whether checks have found differences that still count."""
        return self.level > SERVED or self.above > 0

    @property
    def in_doubt(self) -> bool:
        return self.suspect or self.checked < FIRST_CHECKS


class QualityLimits:
    """Chooses the prompts to check, and sets each tenant's level.

    every: fused prompts of a tenant for one check; allowed: share of checked answers that may differ.
    """

    def __init__(self, interval: int = EVERY, allowed: float = ALLOWED) -> None:
        self.interval, self.allowed = interval, allowed
        self.tenants: dict[str | None, TenantQuality] = {}
        self.checked = self.differed = 0

    def quality_level(self, tenant: str | None) -> int:
        one = self.tenants.get(tenant)
        return one.level if one is not None else SERVED

    def rank(self, tenant: str | None) -> tuple[bool, int]:
        """Return a tenant's rank when places are scarce: suspects first, then by number of prompts.

        A newly invented tenant has the lowest rank.
        """
        one = self.tenants.get(tenant)
        return (one.suspect, one.offered) if one is not None else (False, 0)

    def take(self, tenant: str | None) -> int | None:
        """Count a prompt that could be fused. Returns the level to check it at, or ``None``."""
        quality = self.tenants.pop(tenant, None) or TenantQuality()
        self.tenants[tenant] = quality
        self._forget_one()
        quality.since += 1
        quality.offered += 1
        if quality.since < max(1, self.interval // IN_DOUBT if quality.in_doubt else self.interval):
            return None
        quality.since = 0
        quality.turn = not quality.turn
        if quality.level == STOPPED or (quality.level == RAISED and quality.turn):
            return quality.level - 1
        return quality.level

    def record_check(self, tenant: str | None, level: int, differs: bool) -> str | None:
        """Count a check's result. Returns the name of the tenant's new level, ``None`` if it is
        unchanged."""
        self.checked += 1
        self.differed += differs
        quality = self.tenants.get(tenant)
        if quality is None:
            return None
        quality.checked += 1
        quality.differed += differs
        if level == quality.level:
            quality.above = max(0.0, quality.above + differs - self.allowed)
        elif level == quality.level - 1:
            quality.below = max(0.0, quality.below + max(self.allowed, MIN_GAIN) - differs)
        if quality.above >= ALARM:
            return self._enter_level(quality, quality.level + 1)
        return self._enter_level(quality, quality.level - 1) if quality.below >= ALARM else None

    def stats(self) -> dict[str, Any]:
        """Return the totals. Safe on any thread."""
        levels = [tenant.level for tenant in list(self.tenants.values())]
        return {
            "checked": self.checked,
            "differed": self.differed,
            **{f"tenants_{LEVELS[level]}": levels.count(level) for level in (RAISED, STOPPED)},
        }

    def _enter_level(self, tenant: TenantQuality, level: int) -> str:
        tenant.level, tenant.above, tenant.below = level, 0.0, 0.0
        return LEVELS[level]

    def _forget_one(self) -> None:
        """Forget the tenant of lowest rank (of equals, the least recent), but never the newest."""
        if len(self.tenants) <= MAX_TENANTS:
            return
        newest = next(reversed(self.tenants))
        others = (name for name in self.tenants if name != newest)
        del self.tenants[min(others, key=self.rank)]
