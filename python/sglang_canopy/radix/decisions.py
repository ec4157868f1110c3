"""The last evictions, with what was known of each when it was decided. Bounded."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterator
from typing import NamedTuple

MOST = 4096
"""Decisions remembered, of all tenants together."""
RATE_S = 300.0
"""The rate of eviction is over so many seconds, or over what is remembered."""


class Decision(NamedTuple):
    """Tokens that left a tier."""

    time: float
    """Seconds on the requests' clock."""
    tier: int
    tenant: str | None
    conversation: Hashable | None
    category: str
    offset: int
    tokens: int
    reason: int
    """Index of ``counters.REASONS``."""
    policy: str
    """Who chose them."""
    idle_s: float
    """Seconds since they were last used."""
    demoted: bool
    """Whether the tier below still has them."""


class Decisions:
    """A ring of decisions, filled by the scheduler's thread."""

    def __init__(self, most: int = MOST) -> None:
        self._ring: deque[Decision] = deque(maxlen=most)

    def add(self, decision: Decision) -> None:
        self._ring.append(decision)

    def of(self, tenant: str | None, conversation: Hashable, most: int = 16) -> list[Decision]:
        """The last ones about a tenant's conversation, the newest first."""
        found = []
        for one in reversed(self._ring):
            if one.conversation == conversation and one.tenant == tenant:
                found.append(one)
                if len(found) >= most:
                    break
        return found

    def rate(self, tier: int, now: float) -> float:
        """Tokens a second that leave ``tier``; 0 where none did of late."""
        tokens, since = 0, now
        for one in reversed(self._ring):
            if one.time < now - RATE_S:
                break
            since = one.time
            tokens += one.tokens if one.tier == tier else 0
        return tokens / max(now - since, 1.0)

    def __iter__(self) -> Iterator[Decision]:
        return iter(self._ring)

    def __len__(self) -> int:
        return len(self._ring)
