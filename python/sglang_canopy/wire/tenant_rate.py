"""Token buckets that limit each tenant's calls per second."""

from __future__ import annotations

from collections import OrderedDict

MAX_TENANTS = 4096
"""Maximum tenants with a bucket. A forgotten tenant starts again with a full bucket."""


class TenantRate:
    """At most ``burst`` calls at once and ``per_s`` per second, for each tenant."""

    def __init__(self, per_s: float, burst: int) -> None:
        self.per_s, self.burst = per_s, burst
        self._left: OrderedDict[str | None, tuple[float, float]] = OrderedDict()
        """Tokens in each tenant's bucket, and the time (seconds) of that count."""

    def take(self, tenant: str | None, now: float) -> bool:
        """Take one token at ``now`` (seconds). Returns whether one was available."""
        left, counted_s = self._left.pop(tenant, (float(self.burst), now))
        left = min(self.burst, left + self.per_s * max(0.0, now - counted_s))
        taken = left >= 1.0
        self._left[tenant] = left - taken, max(now, counted_s)
        if len(self._left) > MAX_TENANTS:
            self._left.popitem(last=False)
        return taken

    def __len__(self) -> int:
        return len(self._left)
