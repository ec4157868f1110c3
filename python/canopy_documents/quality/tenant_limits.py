"""Live quality: find tenants whose answers differ too often from full recompute, and limit their
reuse.

Some of a tenant's fused prompts are decoded both ways (:mod:`.checker`). For each, Page's cumulative
sum (Biometrika 41, 1954) adds the difference (0 or 1) minus the allowed share: a fault accumulates,
chance does not. At ``ALARM_SUM`` the tenant's ratio is raised; if that fails, its reuse stops.
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
CHECK_INTERVAL = 100
"""Fused prompts of a tenant for one check: its answers are compared in idle time."""
ALLOWED_SHARE = 0.4
"""Share of a tenant's checked answers that may differ: greedy answers flip at near ties."""
ALARM_SUM = 4.0 - 1e-9
"""Sum at which a tenant's level changes, with a margin for rounding."""
DOUBT_FACTOR = 10
"""Factor on the checked share of a tenant that is new, differed recently, or is limited."""
FIRST_CHECKS = 8
"""Checks after which a tenant is no longer new."""
MIN_GAIN = 0.1
"""Smallest credit of an equal answer towards returning to the previous level."""
MAX_TENANTS = 1024
MIN_RAISED_RATIO = 0.3
TIE_NATS = 0.5
"""Largest preference, in nats, of full recompute for its own token at which two answers still count
as equal.

Compared at the first difference; the other token is then nearly as likely (0.6 times).
"""


def raised_ratio(ratio: float) -> float:
    """Return the ratio of a tenant at ``RAISED``."""
    return min(1.0, max(2 * ratio, MIN_RAISED_RATIO))


def ratio_at(level: int, ratio: float) -> float:
    """Return the ratio of a tenant at ``level`` for the server's ``ratio``."""
    return raised_ratio(ratio) if level >= RAISED else ratio


@dataclass(slots=True)
class TenantQuality:
    """One tenant's checks.

    prompt_count: its prompts that could be fused. since_check: prompts since the last selected for a check. excess_sum,
    deficit_sum: cumulative sums of the excess of differences at its level, and of their deficit at the
    previous level. checks_previous_level: its last check was at that level, if it is raised.
    """

    level: int = SERVED
    prompt_count: int = 0
    since_check: int = 0
    checked: int = 0
    differed: int = 0
    excess_sum: float = 0.0
    deficit_sum: float = 0.0
    checks_previous_level: bool = False

    @property
    def is_suspect(self) -> bool:
        """Whether checks have found differences that still count."""
        return self.level > SERVED or self.excess_sum > 0

    @property
    def is_in_doubt(self) -> bool:
        return self.is_suspect or self.checked < FIRST_CHECKS


class QualityLimits:
    """Chooses the prompts to check, and sets each tenant's level.

    interval: fused prompts of a tenant for one check; allowed_share: share of checked answers that may
    differ.
    """

    def __init__(
        self, interval: int = CHECK_INTERVAL, allowed_share: float = ALLOWED_SHARE
    ) -> None:
        self.interval, self.allowed_share = interval, allowed_share
        self.tenants: dict[str | None, TenantQuality] = {}
        self.checked = self.differed = 0

    def quality_level(self, tenant: str | None) -> int:
        quality = self.tenants.get(tenant)
        return quality.level if quality is not None else SERVED

    def queue_priority(self, tenant: str | None) -> tuple[bool, int]:
        """Return a tenant's priority in a full queue: suspects first, then by number of prompts.

        A newly invented tenant has the lowest priority.
        """
        quality = self.tenants.get(tenant)
        return (quality.is_suspect, quality.prompt_count) if quality is not None else (False, 0)

    def select_check_level(self, tenant: str | None) -> int | None:
        """Count a prompt that could be fused. Returns the level to check it at, or ``None``."""
        quality = self.tenants.pop(tenant, None) or TenantQuality()
        self.tenants[tenant] = quality
        self._forget_lowest()
        quality.since_check += 1
        quality.prompt_count += 1
        factor = DOUBT_FACTOR if quality.is_in_doubt else 1
        if quality.since_check < max(1, self.interval // factor):
            return None
        quality.since_check = 0
        quality.checks_previous_level = not quality.checks_previous_level
        if quality.level == STOPPED or (quality.level == RAISED and quality.checks_previous_level):
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
            quality.excess_sum = max(0.0, quality.excess_sum + differs - self.allowed_share)
        elif level == quality.level - 1:
            gain = max(self.allowed_share, MIN_GAIN) - differs
            quality.deficit_sum = max(0.0, quality.deficit_sum + gain)
        if quality.excess_sum >= ALARM_SUM:
            return self._enter_level(quality, quality.level + 1)
        is_recovered = quality.deficit_sum >= ALARM_SUM
        return self._enter_level(quality, quality.level - 1) if is_recovered else None

    def stats(self) -> dict[str, Any]:
        """Return the totals. Safe on any thread."""
        levels = [tenant.level for tenant in list(self.tenants.values())]
        return {
            "checked": self.checked,
            "differed": self.differed,
            **{f"tenants_{LEVELS[level]}": levels.count(level) for level in (RAISED, STOPPED)},
        }

    def _enter_level(self, quality: TenantQuality, level: int) -> str:
        quality.level, quality.excess_sum, quality.deficit_sum = level, 0.0, 0.0
        return LEVELS[level]

    def _forget_lowest(self) -> None:
        """Forget the tenant of lowest priority (of equals, the least recent), but never the newest."""
        if len(self.tenants) <= MAX_TENANTS:
            return
        newest = next(reversed(self.tenants))
        others = (tenant for tenant in self.tenants if tenant != newest)
        del self.tenants[min(others, key=self.queue_priority)]
